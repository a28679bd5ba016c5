"""Logs that get a cold tier and are opened with it, on real folders and topics of logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.bulk.verifying import verify as verify_log
from strandline.errors import AlreadyExists, InvalidInput, NotALog, NotFound
from strandline.log.object import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.model.retention import Consumed, MaxBytes
from strandline.model.segments import COLD_FILE as COLD
from strandline.tier.copy.segment_files import forget_tails
from strandline.tier.opening import attach, cold_tier, tiered, tiering
from strandline.tier.read.tiered_log import TieredLog
from tests.contracts.logs import append


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


@pytest.fixture(params=["object", "wal"])
def hot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectLog | WalLog]:
    if request.param == "object":
        log = sl.open(str(tmp_path / "log"), create=True)
        assert isinstance(log, ObjectLog)
        yield log
    else:
        with WalLog.open(str(tmp_path / "log"), tail_bytes=0, roll_bytes=0) as log:
            yield log


def forget(log: Any) -> None:
    """Let the hot tier go as far as it may."""
    if isinstance(log, WalLog):
        log.trim(log.bounds().next)
    else:
        log.set_retention(MaxBytes(1))
        log.trim(grace=0.0)


def values(log: Any, since: Cursor | None = None) -> list[bytes]:
    return [value for batch in log.read(since) for value in batch.column("value").to_pylist()]


def test_a_log_without_a_cold_tier_is_itself(hot: ObjectLog | WalLog) -> None:
    assert tiered(hot) is hot
    with pytest.raises(NotFound, match="no cold tier"):
        cold_tier(hot)
    with pytest.raises(NotFound, match="no cold tier"), tiering(hot):
        pass


def test_a_log_with_a_cold_tier_is_opened_with_it(hot: ObjectLog | WalLog, tmp_path: Path) -> None:
    cold = attach(hot, partitions=2, name="orders")
    assert cold == attach(hot, partitions=2) == cold_tier(hot)
    assert (tmp_path / "log" / COLD).exists()
    with pytest.raises(AlreadyExists, match="use that"):
        attach(hot, (tmp_path / "elsewhere").as_uri(), partitions=2)
    with pytest.raises(InvalidInput, match="whole addresses"):
        attach(hot, "elsewhere")
    for number in range(6):
        append(hot, b"%d" % number, b"x" * 100, number=number)
    truth = values(hot)
    with tiering(hot, target=200) as tierer:
        assert tierer.run_once(everything=True).copied
    forget(hot)
    assert hot.bounds().first == 12
    with tiered(hot) as log:
        assert isinstance(log, TieredLog)
        assert (log.bounds().first, log.bounds().next) == (0, 12)
        assert values(log) == truth
        log.slots.create("billing", 4)
        append(log, b"new", number=6)
        assert values(log) == [*truth, b"new"]
        with tiering(hot, retention=Consumed()) as tierer:
            tierer.run_once()
        assert log.bounds().first <= 4
        assert values(log, Cursor(log.log_id, 4)) == [*truth[4:], b"new"]
    assert values(log, Cursor(log.log_id, 4)) == [*truth[4:], b"new"]  # closed, it is opened again when it is needed
    log.close()


def test_opening_gives_the_cold_tier_of_a_log_in_objects(tmp_path: Path) -> None:
    place = str(tmp_path / "log")
    attach(sl.open(place, create=True), partitions=1)
    log = sl.open(place)
    assert isinstance(log, TieredLog)
    append(log, b"a", b"b", number=0)
    with tiering(log.hot) as tierer:
        tierer.run_once(everything=True)
    log.set_retention(MaxBytes(1))
    log.trim(grace=0.0)
    log.slots.create("billing", 1)
    with sl.open(place) as again:
        assert values(again) == [b"a", b"b"]
        slots = [found for found in verify_log(again.hot).findings if found.kind == "slot"]
        assert slots == []
    log.close()


def test_a_write_ahead_log_lives_with_a_cold_tier_in_its_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    with WalLog.open(folder) as log:
        attach(log, partitions=1)
        append(log, b"a", b"b", number=0)
        with tiering(log) as tierer:
            tierer.run_once(everything=True)
        log.trim(2)
    with WalLog.open(folder) as log:
        assert not log.verify().findings
        with tiered(log) as whole:
            assert values(whole) == [b"a", b"b"]


def test_events_that_are_gone_are_not_taken_for_none(tmp_path: Path) -> None:
    place, events = str(tmp_path / "log"), tmp_path / "events"
    log = sl.open(place, create=True)
    attach(log, events=events.as_uri(), partitions=1)
    append(log, b"a", number=0)
    with tiering(log) as tierer:
        tierer.run_once(everything=True)
    forget(log)
    append(log, b"b", number=1)
    events.rename(tmp_path / "away")
    with sl.open(place) as whole:
        for ask in (whole.bounds, lambda: whole.plan(Cursor(whole.log_id, 0)), lambda: whole.slots.create("a", 0)):
            with pytest.raises(NotALog):
                ask()
        assert values(whole, Cursor(whole.log_id, 1)) == [b"b"]
        (tmp_path / "away").rename(events)
        assert values(whole) == [b"a", b"b"]
