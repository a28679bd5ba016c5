"""The seal of a write-ahead log: crashes at every operation, races, failures, and readers in other processes."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any
from uuid import UUID

import pytest

from strandline.errors import (
    CorruptData,
    DiskFull,
    LogClosed,
    LogFailed,
    NotReady,
    Sealed,
    StrandlineError,
    UnsupportedVersion,
)
from strandline.formats.wal import folder as folder_format
from strandline.log.wal import snapshot
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.recover.rewind import rewind
from strandline.log.wal.write.committer import GroupCommitter
from strandline.log.wal.write.identity import IdentityFile
from strandline.log.wal.write.journal import CommitSteps
from strandline.model.cursor import Bounds
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.simdisk import CrashMode, SimulatedDisk, crash_everywhere, fail_everywhere, fill_everywhere
from strandline.testing.stores import together
from tests.contracts.logs import append, content, records, writer_named
from tests.contracts.logs.batches import SOON
from tests.log.wal.workload import FOLDER, WRITER, open_on, payload, values
from tests.matrix_cases import sampled


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Do not log warnings: each of many torn tails would be one."""
    caplog.set_level(logging.ERROR)


# --- crashes ---------------------------------------------------------------------------------------------------

LAST = 2
"""The offset of the last record."""


def sealing(disk: SimulatedDisk, notes: list[Any]) -> None:
    """Append up to the last record, and seal behind it; a process that finds the log sealed does nothing."""
    log = open_on(disk)
    while not log.bounds().sealed:
        end = log.bounds().next
        if end < LAST:
            assert log.append_value(payload(end)).result().first == end
            notes.append(("durable", end + 1))
        else:
            notes.append(("sealed", log.seal().next))
            assert log.bounds().sealed
    log.close()


def sealing_with_the_last(disk: SimulatedDisk, notes: list[Any]) -> None:
    """The same, but the last batch seals the log."""
    log = open_on(disk)
    while not log.bounds().sealed:
        end = log.bounds().next
        if end < LAST:
            log.append_value(payload(end)).result()
            notes.append(("durable", end + 1))
        else:
            handle = log.append(records(payload(end), payload(end + 1)), writer=WRITER, number=0, seal=True)
            assert handle.result().first == end
            notes.append(("sealed", end + 2))
    log.close()


def seen_by_a_reader(disk: SimulatedDisk) -> Bounds | None:
    try:
        return WalReader(FOLDER, env=Env(disk=disk), boot=open_boot(disk)).bounds()
    except (NotReady, StrandlineError):
        return None


def open_boot(disk: SimulatedDisk) -> Any:
    return UUID(int=disk.restarts)


def check(disk: SimulatedDisk, notes: list[Any], at: int) -> None:
    """An acknowledged seal is kept, and none is invented; what a reader or an opening shows is kept, too."""
    shown = seen_by_a_reader(disk)
    log = open_on(disk)
    bounds = log.bounds()
    sealed = [end for what, end in notes if what == "sealed"]
    durable = [end for what, end in notes if what == "durable"]
    assert bounds.next >= max([*durable, *sealed], default=0)
    assert values(log) == {offset: payload(offset) for offset in range(bounds.next)}
    if sealed:
        assert bounds == Bounds(0, sealed[0], sealed=True), f"{bounds} after an acknowledged seal at {sealed[0]}"
    if shown is not None and shown.sealed:
        assert bounds == shown, f"a reader saw {shown}"
    if bounds.sealed:
        # Whole, or not at all: no batch without the seal behind it, no seal without the batch.
        assert bounds.next == at, f"sealed at {bounds.next} without the last batch"
        notes.append(("sealed", bounds.next))  # shown is kept
        with pytest.raises(Sealed):
            log.append_value(b"late")
    else:
        assert bounds.next <= LAST, f"the last batch is there without its seal: {bounds}"
    disk.kill()


def check_sealed_alone(disk: SimulatedDisk, notes: list[Any]) -> None:
    check(disk, notes, LAST)


def check_sealed_with_the_last(disk: SimulatedDisk, notes: list[Any]) -> None:
    check(disk, notes, LAST + 2)


ALONE = (sealing, check_sealed_alone)
WITH_THE_LAST = (sealing_with_the_last, check_sealed_with_the_last)
WORKLOADS = pytest.mark.parametrize("work", [ALONE, WITH_THE_LAST], ids=["alone", "with the last batch"])


@WORKLOADS
@pytest.mark.parametrize("every", sampled(29))
def test_a_crash_at_every_operation_keeps_the_seal_or_there_was_none(work: Any, every: int) -> None:
    explored = crash_everywhere(*work, every=every)
    assert explored.states > 100 / every


@WORKLOADS
@pytest.mark.parametrize("every", sampled(29))
def test_an_operation_that_fails_leaves_the_log_sealed_or_not(work: Any, every: int) -> None:
    modes = (CrashMode.KILL, CrashMode.NOTHING, CrashMode.SCRAPS)
    assert fail_everywhere(*work, modes=modes, limit=3, every=every).states > 20 / every


@WORKLOADS
@pytest.mark.parametrize("every", sampled(29))
def test_a_full_disk_loses_no_seal(work: Any, every: int) -> None:
    modes = (CrashMode.KILL, CrashMode.NOTHING)
    assert fill_everywhere(*work, step=199 * every, modes=modes).states > 10 / every


def explore(work: Any) -> None:
    crash_everywhere(*work, modes=(CrashMode.NOTHING, CrashMode.PREFIX, CrashMode.KILL), seeds=(0,), limit=4)


def test_a_twin_that_seals_in_memory_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdentityFile, "seal", lambda self, at: None)  # noqa: ARG005
    with pytest.raises(AssertionError, match="acknowledged seal"):
        explore(ALONE)


def test_a_twin_that_seals_a_step_after_the_last_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = CommitSteps.finish

    def late(self: CommitSteps, written: Any) -> None:
        finish(self, written)
        if written.seals:
            self._sealing(written.held[-1].next)

    monkeypatch.setattr(CommitSteps, "write", _without_the_note)
    monkeypatch.setattr(CommitSteps, "finish", late)
    with pytest.raises(AssertionError, match="without its seal"):
        explore(WITH_THE_LAST)


_write = CommitSteps.write


def _without_the_note(self: CommitSteps, items: Any) -> Any:
    noted, self._sealing = self._sealing, lambda at: None  # noqa: ARG005
    try:
        return _write(self, items)
    finally:
        self._sealing = noted


def test_a_twin_that_keeps_the_seal_of_a_batch_that_was_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        IdentityFile,
        "opened",
        classmethod(lambda cls, folder, end, *, disk: cls(folder, is_sealed=_noted(folder, disk), disk=disk)),  # noqa: ARG005
    )
    with pytest.raises(AssertionError, match="without the last batch"):
        explore(WITH_THE_LAST)


def _noted(folder: str, disk: Any) -> bool:
    return b'"sealed"' in disk.read(f"{folder}/log.json")


# --- opening, copies, versions ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Any) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def ended(folder: str) -> str:
    """The folder of a closed, sealed log with three records."""
    with WalLog.open(folder) as log:
        append(log, b"a", b"b", number=0)
        append(log, b"c", number=1)
        log.seal()
    return folder


def test_a_sealed_log_is_sealed_when_it_is_opened_again(ended: str) -> None:
    with WalLog.open(ended) as log:
        assert log.bounds() == Bounds(0, 3, sealed=True)
        assert log.seal().next == 3
        assert append(log, b"c", number=1).first == 2
        with pytest.raises(Sealed):
            append(log, b"d", number=2)
        with pytest.raises(Sealed):
            log.append_value(b"d")
    assert WalReader(ended).bounds() == Bounds(0, 3, sealed=True)


def test_a_reader_in_another_process_sees_the_seal_of_a_log_that_is_open(folder: str) -> None:
    with WalLog.open(folder) as log:
        reader = WalReader(folder)
        append(log, b"a", number=0)
        assert reader.bounds() == Bounds(0, 1)
        log.seal()
        assert reader.bounds() == Bounds(0, 1, sealed=True)
        assert not reader.wait(reader.end(), 3600.0)


def test_a_seal_survives_trims_that_begin_new_files(folder: str) -> None:
    with WalLog.open(folder, roll_bytes=0) as log:
        for number in range(3):
            append(log, b"x", number=number)
        log.seal()
        assert log.trim(3) == 3
        assert log.bounds() == Bounds(3, 3, sealed=True)
    with WalLog.open(folder) as log:
        assert log.bounds() == Bounds(3, 3, sealed=True)
        with pytest.raises(Sealed):
            append(log, b"y", number=3)


def test_a_copy_of_a_sealed_log_is_sealed_and_its_rewound_part_is_not(ended: str, tmp_path: Any) -> None:
    copy, aside = tmp_path / "copy", tmp_path / "aside"
    copy.mkdir()
    with WalLog.open(ended) as log:
        snapshot.fill(log, str(copy))
    assert snapshot.verify(str(copy)).next == 3
    with WalLog.open(str(copy)) as log:
        assert log.bounds().sealed
    rewind(ended, 2, quarantine=str(aside))
    with WalLog.open(ended) as log:
        assert log.bounds() == Bounds(0, 2)
        assert append(log, b"d", number=1).first == 2  # where it was sealed before: and it is not, now
        assert not log.bounds().sealed
    with WalLog.open(str(aside)) as log:
        assert log.bounds() == Bounds(2, 3, sealed=True)


def test_the_identity_of_a_log_that_is_not_sealed_has_the_format_of_before(folder: str) -> None:
    with WalLog.open(folder) as log:
        append(log, b"a", number=0)
        before = json.loads(DISK.read(f"{folder}/log.json"))
        assert (before["version"], before["min_reader"]) == (1, 1)
        assert "sealed" not in before
        log.seal()
    after = json.loads(DISK.read(f"{folder}/log.json"))
    assert (after["version"], after["min_reader"], after["sealed"]) == (2, 2, 1)


def test_a_program_that_does_not_know_the_seal_does_not_open_the_log(
    ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_format, "SEALED_VERSION", 1)
    for opening in (WalLog.open, WalReader):
        with pytest.raises(UnsupportedVersion, match="upgrade strandline"):
            opening(ended)


def test_records_behind_the_seal_are_damage_and_change_nothing(ended: str) -> None:
    log_json = f"{ended}/log.json"
    fields = json.loads(DISK.read(log_json))
    fields.pop("checksum")
    DISK.remove(log_json)
    DISK.write_new(log_json, [json.dumps({**fields, "sealed": 2}).encode()])
    with pytest.raises(CorruptData, match="sealed at offset 2, and it ends at 3"):
        WalLog.open(ended)


# --- races and failures ----------------------------------------------------------------------------------------


def test_what_was_queued_before_the_seal_is_durable_below_it(folder: str) -> None:
    with WalLog.open(folder, background=False) as log:
        handles = [log.append_value(b"%d" % offset) for offset in range(5)]
        assert log.seal().next == 5
        assert [handle.result(0).first for handle in handles] == [0, 1, 2, 3, 4]


def test_single_values_race_with_a_seal(folder: str) -> None:
    with WalLog.open(folder) as log:
        kept: list[list[int]] = [[], []]
        ends: list[int] = []

        def write(name: int) -> None:
            while True:
                try:
                    first = log.append_value(b"x").result().first
                except Sealed:
                    return
                assert first is not None
                kept[name].append(first)

        def seal() -> None:
            log.wait(log.start().at(50), SOON)
            ends.append(log.seal().next)

        together(lambda: write(0), lambda: write(1), seal, seal)
        assert sorted(kept[0] + kept[1]) == list(range(ends[0]))
        assert ends == [ends[0]] * 2
        assert len(content(log)) == ends[0]


def test_a_closed_log_is_not_sealed(folder: str) -> None:
    log = WalLog.open(folder)
    append(log, b"a", number=0)
    log.close()
    with pytest.raises(LogClosed):
        log.seal()
    with WalLog.open(folder) as log:
        assert not log.bounds().sealed


def test_a_seal_that_cannot_be_written_stops_the_log_until_it_is_opened_again(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = WalLog.open(folder)
    append(log, b"a", number=0)

    def full(self: IdentityFile, at: int) -> None:
        raise DiskFull("no room")

    with monkeypatch.context() as patched:
        patched.setattr(IdentityFile, "seal", full)
        with pytest.raises(DiskFull):
            log.seal()
    with pytest.raises(DiskFull, match="open it again"):
        append(log, b"b", number=1)
    log.close()
    with WalLog.open(folder) as log:
        assert append(log, b"b", number=1).first == 1


def refused_while_sealing(log: WalLog, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Why an append is refused that comes while a seal is being written, which then fails."""
    inside, fails = threading.Event(), threading.Event()
    raised: list[Exception] = []

    def full(self: IdentityFile, at: int) -> None:
        inside.set()
        fails.wait(SOON)
        raise DiskFull("no room")

    def sealing() -> None:
        with pytest.raises(DiskFull):
            log.seal()

    def appending() -> None:
        try:
            append(log, b"late", writer=writer_named(2), number=0)
        except (Sealed, DiskFull) as error:
            raised.append(error)

    monkeypatch.setattr(IdentityFile, "seal", full)
    first, second = threading.Thread(target=sealing), threading.Thread(target=appending)
    first.start()
    assert inside.wait(SOON)
    second.start()
    while second.is_alive() and not getattr(log._committer._sealing, "_waiters", None):
        CLOCK.sleep(0.001)
    fails.set()
    first.join(SOON)
    second.join(SOON)
    return raised[0]


def test_nobody_is_told_of_a_seal_before_it_is_durable(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = WalLog.open(folder)
    append(log, b"a", number=0)
    assert isinstance(refused_while_sealing(log, monkeypatch), DiskFull)
    log.close()
    with WalLog.open(folder) as again:
        assert append(again, b"b", number=1).first == 1


def test_a_twin_that_tells_of_a_seal_early_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: GroupCommitter) -> None:
        if self.sealed:
            raise Sealed.at(self.next)

    monkeypatch.setattr(GroupCommitter, "_check_unsealed", early)
    log = WalLog.open(folder)
    assert isinstance(refused_while_sealing(log, monkeypatch), Sealed)
    with pytest.raises(DiskFull):  # which nobody has been told
        log.close()


def test_a_log_that_is_being_closed_can_still_be_sealed_and_closes_without_an_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = WalLog.open(folder)
    append(log, b"a", number=0)
    end_intake = GroupCommitter.end_intake

    def closing(self: GroupCommitter) -> Any:
        queued = end_intake(self)
        threading.Thread(target=log.close).start()
        while self._refusal is None:
            CLOCK.sleep(0.001)
        return queued

    monkeypatch.setattr(GroupCommitter, "end_intake", closing)
    assert log.seal().next == 1
    log.close()
    with WalLog.open(folder) as again:
        assert again.bounds() == Bounds(0, 1, sealed=True)


def test_an_append_behind_an_interrupted_seal_is_refused_and_does_not_hang(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = WalLog.open(folder)
    append(log, b"a", number=0)
    end_intake = GroupCommitter.end_intake

    def interrupted(self: GroupCommitter) -> None:
        end_intake(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GroupCommitter, "end_intake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.seal()
    raised: list[Exception] = []

    def appending() -> None:
        try:
            append(log, b"b", number=1)
        except StrandlineError as error:
            raised.append(error)

    thread = threading.Thread(target=appending, daemon=True)
    thread.start()
    thread.join(SOON)
    assert [type(error) for error in raised] == [LogFailed]
    log.close()
    with WalLog.open(folder) as again:
        assert append(again, b"b", number=1).first == 1


@pytest.mark.parametrize("writer", [None, writer_named(3)])
def test_the_last_batch_may_be_without_a_number(folder: str, writer: Any) -> None:
    with WalLog.open(folder) as log:
        number = None if writer is None else 0
        assert log.append_batch(records(b"a"), writer=writer, number=number, seal=True).result(SOON).first == 0
        assert log.bounds() == Bounds(0, 1, sealed=True)
