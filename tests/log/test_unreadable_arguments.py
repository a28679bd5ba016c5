"""No argument is stored that could not be decoded: the log would be damaged by an acknowledged call."""

import math

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import StrandlineError
from strandline.model.retention import MaxAge, MaxBytes, SlotLimits

NUMBERS = [True, 1.5, 1.0, math.nan, math.inf, "1", b"1", None, 1 << 63, 1 << 70, -1]
TEXTS = [5, 1.5, True, b"holder", ["holder"], {"holder": 1}, "\ud800"]


@pytest.fixture(params=["object", "wal"])
def log(request, tmp_path):
    if request.param == "object":
        log = sl.open(str(tmp_path / "log"), create=True)
        log.append(pa.table({"value": [b"1", b"2"]}), writer=sl.log.WriterId(log.log_id), number=0).result(30)
        yield log
        return
    with sl.compat.WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append_many([b"1", b"2"])
        yield wal.log


def reopened(log, tmp_path):
    """The log as another process opens it."""
    if isinstance(log, sl.log.ObjectLog):
        return sl.open(str(tmp_path / "log"))
    return sl.log.WalReader(tmp_path / "log")


def check_refused(call, log, tmp_path):
    before = log.slots.list()
    with pytest.raises(StrandlineError):
        call()
    assert log.slots.list() == before
    assert reopened(log, tmp_path).bounds() == sl.log.Bounds(0, 2)
    if isinstance(log, sl.log.ObjectLog):
        assert reopened(log, tmp_path).slots.list() == before


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_slots_position_is_a_whole_number(log, tmp_path, number):
    check_refused(lambda: log.slots.create("s", number), log, tmp_path)
    log.slots.create("t", 0)
    check_refused(lambda: log.slots.reset("t", number), log, tmp_path)
    slot = log.slots.claim("t", "me")
    check_refused(lambda: slot.advance(sl.Cursor(log.log_id, number)), log, tmp_path)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_slots_holder_is_a_text(log, tmp_path, text):
    log.slots.create("s", 0)
    check_refused(lambda: log.slots.claim("s", text), log, tmp_path)


@pytest.mark.parametrize("seconds", [*NUMBERS[2:], True, 0, 1e18, 1e300], ids=repr)
def test_a_hold_lasts_a_time_that_can_be_written_down(tmp_path, seconds):
    log = sl.open(str(tmp_path / "log"), create=True)
    if seconds == 1.0 and seconds is not True:
        log.hold(0, seconds)
        assert len(sl.open(str(tmp_path / "log")).slots.list()) == 1
        return
    with pytest.raises(StrandlineError, match="seconds is a number of seconds above 0"):
        log.hold(0, seconds)
    assert sl.open(str(tmp_path / "log")).slots.list() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.set_retention(True),
        lambda log: log.set_retention(MaxAge(1.5)),
        lambda log: log.set_retention(MaxAge(math.nan)),
        lambda log: log.set_retention(MaxAge(1 << 80)),
        lambda log: log.set_retention(MaxBytes(1.5)),
        lambda log: log.set_retention("bytes:99999999999TiB"),
        lambda log: log.set_retention("forever", SlotLimits(idle_seconds=1.5)),
        lambda log: log.set_retention("forever", SlotLimits(lag_bytes=1 << 70)),
        lambda log: log.set_retention("forever", 5),
    ],
)
def test_a_retention_that_could_not_be_read_again_is_refused(tmp_path, change):
    log = sl.open(str(tmp_path / "log"), create=True, retention="age:7d")
    with pytest.raises(sl.errors.InvalidInput):
        change(log)
    assert sl.open(str(tmp_path / "log")).identity == log.identity


@pytest.mark.parametrize("wrong", [True, 5, object()], ids=["bool", "int", "object"])
def test_no_log_is_created_with_a_policy_that_is_none(tmp_path, wrong):
    with pytest.raises(sl.errors.InvalidInput):
        sl.open(str(tmp_path / "log"), create=True, retention=wrong)
    with pytest.raises(sl.errors.InvalidInput):
        sl.open(str(tmp_path / "log"), create=True, limits=wrong)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("number", [True, 1.5, math.nan, math.inf, "1"], ids=repr)
def test_a_write_ahead_log_is_trimmed_up_to_a_whole_number(tmp_path, number):
    with sl.compat.WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append_many([b"1", b"2"])
        with pytest.raises(sl.errors.InvalidInput, match="whole number"):
            wal.prune_through(number)
        wal.append(b"3")
    with sl.compat.WriteAheadLog.open(tmp_path / "log") as wal:
        assert (wal.oldest, wal.current) == (1, 3)
