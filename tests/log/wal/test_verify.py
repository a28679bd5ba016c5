"""Verifying a write-ahead log, and rebuilding its indexes: on real folders and damaged copies of them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import CorruptData, NotALog, UnsupportedVersion
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.wal.frame import FrameInfo, FrameScanner, encode_frame
from strandline.formats.wal.index import INDEX_LEAD, decode_index, encode_entry, new_chain
from strandline.log.findings import Finding, FindingKind, Severity
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import firsts_in, salt_of
from strandline.log.wal.recover.manual_repair import plan_repair, repair_log
from strandline.log.wal.recover.repair import rebuild_index
from strandline.log.wal.recover.verify import WalVerification, verify
from strandline.log.wal.recover.walk import Hole, frames_of, walk
from strandline.model.head import WriterId
from strandline.model.records import Op, record_batch
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK, LocalDisk
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.simdisk import CrashMode, SimulatedDisk, crash_everywhere
from tests.disk_doubles import damage_everywhere
from tests.log.wal.workload import FOLDER, check, workload
from tests.matrix_cases import sampled, some

WRITER = WriterId(UUID(int=7))


def fill(log: WalLog, groups: int = 4, frames: int = 70) -> None:
    """Append frames in groups: each group is one sync, and a file is full after one or two of them."""
    number = max((state.number for state in log._journal.place.writers.values()), default=-1) + 1
    for _ in range(groups):
        for _ in range(frames):
            batch = record_batch(timestamps=[1, 2], ops=[Op.PUT] * 2, keys=[b"k"] * 2, values=[b"v" * 20, b"w"])
            handle = log.append(batch, writer=WRITER, number=number)
            number += 1
        handle.result()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed log with four files, two slots, and something trimmed; no test changes it."""
    folder = tmp_path_factory.mktemp("wal") / "log"
    with WalLog.open(str(folder), roll_bytes=60_000, background=False) as log:
        fill(log)
        log.slots.create("a", 100)
        log.slots.create("b", 200)
        log.trim(50)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the closed log."""
    return Path(shutil.copytree(whole, tmp_path / "log"))


def look(folder: Path) -> WalVerification:
    return verify(str(folder), env=SYSTEM)


def only(found: WalVerification, severity: Severity, kind: FindingKind) -> Finding:
    """The one finding, of this kind."""
    (finding,) = found.findings
    assert (finding.severity, finding.kind) == (severity, kind), finding
    return finding


def files(folder: Path) -> list[Path]:
    return [folder / f"{first:020d}.log" for first in firsts_in(DISK.scan(str(folder)))]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def log_id_of(folder: Path) -> UUID:
    return UUID(json.loads((folder / "log.json").read_bytes())["log_id"])


def a_frame(folder: Path, *, first: int, term: int = 0, durable: int = 0, count: int = 1, rows: int = 1) -> bytes:
    """A frame as the log would write it at an offset."""
    batch = record_batch(timestamps=[1] * rows, ops=[Op.PUT] * rows, keys=[None] * rows, values=[b"v"] * rows)
    info = FrameInfo(term, first + 1, count, 10**12, durable, salt_of(log_id_of(folder)))
    return b"".join(encode_frame(info, [encode_page(batch, Compression.NONE)]))


# --- what is whole -----------------------------------------------------------------------------------------------


def test_a_whole_log_is_clean_and_all_of_it_was_read(folder: Path) -> None:
    before = contents(folder)
    told: list[int] = []
    found = verify(str(folder), env=SYSTEM, on_progress=told.append)
    assert found.findings == []
    assert found.is_clean
    assert (found.bounds.first, found.bounds.next) == (50, 560)
    size = sum(path.stat().st_size for path in files(folder))
    seen = found.examined
    assert seen == {"files": 4, "frames": 280, "records": 560, "bytes": size, "slots": 2}
    assert sum(told) == size
    assert contents(folder) == before


def test_an_open_log_verifies_itself_and_so_does_an_empty_one(tmp_path: Path) -> None:
    with WriteAheadLog.open(tmp_path / "log", roll_bytes=0, background=False) as wal:
        assert wal.verify().findings == []
        wal.append(b"one")
        wal.append_many([b"two", b"three"])
        found = wal.verify()
        assert (found.findings, found.examined["records"]) == ([], 3)
        wal.prune_through(3)
        assert (wal.verify().findings, wal.verify().bounds.first) == ([], 3)


def test_where_there_is_no_log_that_is_an_error_and_no_finding(tmp_path: Path) -> None:
    with pytest.raises(NotALog):
        look(tmp_path)


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", sampled(3))
@pytest.mark.parametrize("number", some([3, 1], 1))
def test_whatever_byte_of_a_file_is_changed_it_is_found_with_its_place(folder: Path, number: int, every: int) -> None:
    path = files(folder)[number]
    data = path.read_bytes()
    for at in [*range(0, 800, 61), *range(800, len(data), len(data) // 15), len(data) - 1][::every]:
        flip(path, at)
        found = look(folder)
        (finding,) = found.damage
        assert finding.where == str(path)
        assert finding.byte is not None
        assert finding.byte <= at
        assert f"byte {finding.byte}" in finding.message
        path.write_bytes(data)


def test_each_of_several_damaged_places_is_reported_with_the_lost_offsets(folder: Path) -> None:
    path = files(folder)[1]
    frames = list(FrameScanner(memoryview(path.read_bytes())))
    for frame in (frames[5], frames[40]):
        flip(path, frame.end - 20)
    flip(path, frames[20].start + 10)  # a header: where its frame ends is then not known
    found = look(folder)
    assert [finding.byte for finding in found.damage] == [frames[5].start, frames[20].start, frames[40].start]
    lost = [frames[at].info.first - 1 for at in (5, 20, 40)]
    for finding, offset in zip(found.damage, lost, strict=True):
        assert f"offsets {offset} to {offset + 1} are lost" in finding.message
    assert not any(finding.kind is FindingKind.INDEX for finding in found.findings)


def test_an_index_is_not_blamed_for_a_checkpoint_within_damage(folder: Path) -> None:
    path = files(folder)[1]
    frames = list(FrameScanner(memoryview(path.read_bytes())))
    for frame in frames[64:66]:  # the second of them has a checkpoint
        flip(path, frame.start + 10)
    (finding,) = look(folder).findings
    assert (finding.severity, finding.byte) == (Severity.DAMAGE, frames[64].start)


def test_a_file_full_of_damage_is_not_reported_byte_by_byte(folder: Path) -> None:
    path = files(folder)[1]
    frame = a_frame(folder, first=5)
    path.write_bytes(path.read_bytes() + frame * 500)
    assert len(look(folder).findings) <= 101


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_file_that_is_missing_is_damage(folder: Path, number: int) -> None:
    files(folder)[number].unlink()
    found = look(folder)
    assert [finding.kind for finding in found.damage] == [FindingKind.CONTINUITY]


def test_a_log_without_any_file_is_damage(folder: Path) -> None:
    for path in files(folder):
        path.unlink()
    assert [finding.kind for finding in look(folder).damage] == [FindingKind.CONTINUITY]


@pytest.mark.matrix
def test_a_file_that_was_cut_below_the_mark_is_damage_even_at_the_end_of_a_frame(folder: Path) -> None:
    for path in (files(folder)[1], files(folder)[3]):
        data = path.read_bytes()
        ends = [frame.end for frame in FrameScanner(memoryview(data))]
        for size in (0, 10, ends[0], ends[5], ends[5] + 3, ends[-2]):
            path.write_bytes(data[:size])
            (finding,) = look(folder).damage
            assert finding.where == str(path)
        path.write_bytes(data)


def test_a_file_of_another_log_is_damage(folder: Path, tmp_path: Path) -> None:
    WalLog.open(str(tmp_path / "other"), background=False).close()
    files(folder)[3].write_bytes(files(tmp_path / "other")[0].read_bytes())
    found = look(folder)
    assert "it is a file of log" in found.damage[0].message


def test_frames_that_do_not_follow_each_other_are_damage(folder: Path) -> None:
    path = files(folder)[1]
    data = path.read_bytes()
    frames = list(FrameScanner(memoryview(data)))
    five, six = (data[frames[at].start : frames[at].end] for at in (5, 6))
    for wrong, why in (
        (five + five + six, "is there again"),
        (b"", "continues at offset"),
        (six + five, "continues at"),
    ):
        path.write_bytes(data[: frames[5].start] + wrong + data[frames[7].start :])
        found = look(folder)
        assert not found.is_clean
        assert why in found.damage[0].message
        path.write_bytes(data)


def test_a_file_that_continues_after_the_beginning_of_the_next_is_damage(folder: Path) -> None:
    path, following = files(folder)[1], firsts_in(DISK.scan(str(folder)))[2]
    path.write_bytes(path.read_bytes() + a_frame(folder, first=following))
    assert f"the next file begins at {following}" in only(look(folder), Severity.DAMAGE, FindingKind.CONTINUITY).message


def appended(folder: Path, *frames: bytes) -> WalVerification:
    """The log with more frames, and a last one that marks them as durable."""
    last, end = files(folder)[-1], 560 + len(frames)
    last.write_bytes(last.read_bytes() + b"".join(frames) + a_frame(folder, first=end, durable=end))
    (folder / "mark").unlink()
    return look(folder)


def test_a_term_that_goes_down_is_damage(folder: Path) -> None:
    found = appended(folder, a_frame(folder, first=560, term=9), a_frame(folder, first=561))
    assert "the term goes down from 9 to 0" in found.damage[0].message


def test_records_that_cannot_be_read_are_damage_though_every_checksum_is_right(folder: Path) -> None:
    found = appended(folder, a_frame(folder, first=560, count=1, rows=3))
    assert "it holds 3 records in 1 pages, its header says 1" in found.damage[0].message


def test_a_frame_that_claims_more_than_it_can_know_is_damage(folder: Path) -> None:
    found = appended(folder, a_frame(folder, first=560, durable=900))
    assert "says that everything below 900 was durable before it" in found.damage[0].message


def test_a_frame_of_a_newer_version_is_reported_as_such_wherever_it_is(folder: Path) -> None:
    last = files(folder)[-1]
    last.write_bytes(last.read_bytes() + b"RDLW\x05" + bytes(100))
    finding = only(look(folder), Severity.DAMAGE, FindingKind.VERSION)
    assert "a frame is of version 5. Upgrade strandline." in finding.message


# --- above the mark ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [b"R", b"RDLW\x04", bytes(5000), b"no frame"])
def test_a_torn_tail_above_the_mark_is_a_note_of_what_opening_cuts(folder: Path, tail: bytes) -> None:
    last = files(folder)[-1]
    size = last.stat().st_size
    last.write_bytes(last.read_bytes() + tail)
    finding = only(look(folder), Severity.NOTE, FindingKind.TAIL)
    assert (finding.where, finding.byte) == (str(last), size)
    assert f"a torn tail of {len(tail)} bytes from byte {size} on" in finding.message
    assert look(folder).bounds.next == 560


def test_a_file_that_was_never_finished_is_a_note(folder: Path) -> None:
    (folder / f"{560:020d}.log").write_bytes(b"RDL")
    assert "it was never finished" in only(look(folder), Severity.NOTE, FindingKind.TAIL).message
    (folder / f"{560:020d}.log").write_bytes(b"")
    assert only(look(folder), Severity.NOTE, FindingKind.TAIL).byte == 0


def test_whole_frames_above_the_mark_are_part_of_the_log(folder: Path) -> None:
    last = files(folder)[-1]
    last.write_bytes(last.read_bytes() + a_frame(folder, first=560))
    assert (look(folder).findings, look(folder).bounds.next) == ([], 561)


def _opens(folder: Path) -> bool:
    try:
        WalLog.open(str(folder), create=False, background=False).close()
    except (CorruptData, UnsupportedVersion):
        return False
    return True


@pytest.mark.parametrize("every", sampled(5))
@pytest.mark.parametrize("mark", ["kept", "gone"])
def test_damage_in_the_last_file_is_damage_if_opening_refuses_it_and_only_then(
    tmp_path: Path, mark: str, every: int
) -> None:
    made = tmp_path / "made"
    with WalLog.open(str(made), background=False) as log:
        fill(log, groups=5, frames=2)
    if mark == "gone":
        (made / "mark").unlink()
    path = files(made)[0]
    data = path.read_bytes()
    both = set()
    for at in range(680, len(data), 211 * every):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            copy = Path(shutil.copytree(made, tmp_path / "copy"))
            (copy / path.name).write_bytes(changed)
            clean = look(copy).is_clean
            assert clean == _opens(copy), at
            both.add(clean)
            if clean:
                assert look(copy).is_clean  # and so is what opening made of it
            shutil.rmtree(copy)
    assert both == ({False} if mark == "kept" else {True, False})


# --- beside the frames -------------------------------------------------------------------------------------------


def test_an_index_that_is_missing_short_or_wrong_is_a_note_for_it_can_be_made_again(folder: Path) -> None:
    first = firsts_in(DISK.scan(str(folder)))[1]
    path = folder / f"{first:020d}.index"
    data, log_id = path.read_bytes(), log_id_of(folder)
    index = decode_index(data, new_chain(log_id, first))
    assert index.entries
    entry = index.entries[0]._replace(position=index.entries[0].position + 8)
    wrong = INDEX_LEAD + encode_entry(entry, new_chain(log_id, first))[0]
    nobody = INDEX_LEAD + encode_entry(index.entries[0]._replace(writers={}), new_chain(log_id, first))[0]
    for changed in (None, b"", data[:-1], data[:8], data + b"x", wrong, nobody):
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        found = look(folder)
        assert only(found, Severity.NOTE, FindingKind.INDEX).where == str(path), changed
        assert found.indexes == (first,)
        rebuild_index(str(folder), log_id, first, disk=DISK)
        assert path.read_bytes() == data
        assert look(folder).findings == []


def test_no_index_is_rebuilt_from_a_damaged_file(folder: Path) -> None:
    first = firsts_in(DISK.scan(str(folder)))[1]
    flip(files(folder)[1], 5000)
    before = contents(folder)
    with pytest.raises(CorruptData, match="byte"):
        rebuild_index(str(folder), log_id_of(folder), first, disk=DISK)
    assert contents(folder) == before


def test_an_index_proves_what_was_durable_though_the_mark_is_missing(tmp_path: Path) -> None:
    with WalLog.open(str(tmp_path / "log"), background=False) as log:
        fill(log, groups=1, frames=65)  # one group: no frame tells of another
    folder = tmp_path / "log"
    (folder / "mark").unlink()
    flip(files(folder)[0], 5000)
    assert len(look(folder).damage) == 1
    for path in folder.glob("*.index"):
        path.unlink()
    assert look(folder).is_clean


def test_slots_that_are_missing_damaged_or_of_another_log_are_damage(folder: Path) -> None:
    path = folder / "slots.json"
    data = path.read_bytes()
    other = data.replace(str(log_id_of(folder)).encode(), str(UUID(int=1)).encode())
    for changed in (None, b"", data[:-10], data.replace(b'"start": 50', b'"start": 40'), other):
        path.unlink() if changed is None else path.write_bytes(changed)
        assert only(look(folder), Severity.DAMAGE, FindingKind.SLOT).where == str(path)


def test_a_slot_outside_the_log_is_damage(folder: Path, tmp_path: Path) -> None:
    with WalLog.open(str(folder), background=False) as log:
        fill(log, groups=1, frames=1)
        log.slots.create("ahead", 562)
    shutil.copy(folder / "slots.json", tmp_path / "newer")
    shutil.rmtree(folder)
    with WalLog.open(str(folder), background=False) as log:
        fill(log, groups=1)
    newer = (tmp_path / "newer").read_bytes()
    (folder / "log.json").write_text(
        (folder / "log.json").read_text().replace(str(log_id_of(folder)), json.loads(newer)["log_id"])
    )
    (folder / "slots.json").write_bytes(newer)
    kinds = {finding.kind for finding in look(folder).damage}
    assert FindingKind.SLOT in kinds


def test_a_mark_that_cannot_be_read_is_a_note(folder: Path) -> None:
    for changed in (b"", b"x" * 100):
        (folder / "mark").write_bytes(changed)
        only(look(folder), Severity.NOTE, FindingKind.MARK)


def test_without_its_identity_a_log_is_damaged_and_the_rest_of_it_is_read(folder: Path) -> None:
    flip(files(folder)[1], 5000)
    for changed in (None, b"{"):
        (folder / "log.json").unlink() if changed is None else (folder / "log.json").write_bytes(changed)
        found = look(folder)
        assert [finding.kind for finding in found.damage] == [FindingKind.IDENTITY, FindingKind.FRAME]
        assert found.examined["files"] == 4


def test_leftovers_are_noted(folder: Path) -> None:
    (folder / f"{0:020d}.600.0.torn").write_bytes(b"abc")
    (folder / "slots.json.new").write_bytes(b"abc")
    (folder / "notes.txt").write_bytes(b"abc")
    (folder / f"{5:020d}.index").write_bytes(b"abc")
    found = look(folder)
    assert found.is_clean
    kinds = sorted(finding.kind for finding in found.findings)
    assert kinds == [FindingKind.INDEX, FindingKind.PIECE, FindingKind.STRANGER, FindingKind.STRANGER]
    assert "holds 3 bytes" in next(finding.message for finding in found.findings if finding.kind is FindingKind.PIECE)


def test_a_file_below_the_start_that_was_not_removed_yet_is_noted_and_not_judged(folder: Path) -> None:
    first = files(folder)[0]
    data = first.read_bytes()
    with WalLog.open(str(folder), background=False) as log:
        log.trim(300, beyond_slots=True)
    first.write_bytes(data[:1000])
    second = firsts_in(DISK.scan(str(folder)))[1]
    with WalLog.open(str(folder), background=False):
        assert not first.exists()
    first.write_bytes(data[:1000])
    assert second <= 300
    assert only(look(folder), Severity.NOTE, FindingKind.TRIM).where == str(first)


# --- beside a writer ---------------------------------------------------------------------------------------------


class Meddled(LocalDisk):
    """A disk that calls a function before a file is read."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self._before = before
        self.lengths: list[int] = []

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self._before(path)
        data = super().read(path, start, length)
        self.lengths.append(len(data))
        return data


@pytest.fixture
def writer(folder: Path) -> Iterator[WalLog]:
    with WalLog.open(str(folder), roll_bytes=60_000, background=False) as log:
        yield log


def test_records_that_are_appended_or_trimmed_meanwhile_cause_no_finding(folder: Path, writer: WalLog) -> None:
    def step(path: str) -> None:
        if path.endswith(".log"):
            fill(writer, groups=1, frames=5)
            writer.trim(writer.bounds().next - 5, beyond_slots=True)

    disk = Meddled(step)
    found = verify(str(folder), env=Env(disk=disk, clock=CLOCK))
    assert found.damage == []
    assert look(folder).damage == []


def test_everything_may_be_trimmed_between_any_two_reads(whole: Path, tmp_path: Path) -> None:
    reads = 0

    def count(_: str) -> None:
        nonlocal reads
        reads += 1

    verify(str(whole), env=Env(disk=Meddled(count), clock=CLOCK))
    assert reads > 8
    for at in range(reads):
        folder = Path(shutil.copytree(whole, tmp_path / "log"))
        with WalLog.open(str(folder), background=False) as log:
            left = at

            def trim(_: str, log: WalLog = log) -> None:
                nonlocal left
                if left == 0:
                    log.trim(560, beyond_slots=True)
                left -= 1

            assert verify(str(folder), env=Env(disk=Meddled(trim), clock=CLOCK)).damage == [], at
        shutil.rmtree(folder)


def test_a_write_under_way_is_no_damage(folder: Path, writer: WalLog) -> None:
    fill(writer, groups=1, frames=1)
    last = files(folder)[-1]
    last.write_bytes(last.read_bytes() + a_frame(folder, first=562)[:200])  # half of it is there so far
    finding = only(look(folder), Severity.NOTE, FindingKind.TAIL)
    assert "unless it is being written" in finding.message


def test_a_writer_that_appends_during_a_verification_causes_no_finding(folder: Path) -> None:
    last = files(folder)[-1]
    torn = last.read_bytes() + b"torn"
    last.write_bytes(torn + a_frame(folder, first=562, durable=562))  # as if read before and after it was put right
    mark = (folder / "mark").read_bytes()
    assert not look(folder).is_clean

    def publish(path: str) -> None:
        if path == str(last):
            (folder / "mark").write_bytes(bytes(len(mark)))

    assert verify(str(folder), env=Env(disk=Meddled(publish), clock=CLOCK)).is_clean


# --- memory ------------------------------------------------------------------------------------------------------


def test_a_file_is_read_in_windows_and_a_large_frame_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with WalLog.open(str(folder), background=False) as log:
        for size in (10, 300_000, 10, 70_000, 10, 10):
            log.append_value(b"x" * size).result()
        log_id = log.log_id
    path = str(files(folder)[0])
    size = DISK.size(path)
    everything = list(walk(path, size, is_own=frames_of(log_id), disk=DISK))
    assert len(everything) == 7
    for window in (1, 64, 700, 1000, 65_536, 1 << 23):
        disk = Meddled(lambda _: None)
        assert list(walk(path, size, is_own=frames_of(log_id), disk=disk, window=window)) == everything
        assert max(disk.lengths) <= max(window, 302_000)
    flip(Path(path), 200_000)
    flip(Path(path), size - 10)
    for window in (64, 1000, 1 << 23):
        found = list(walk(path, size, is_own=frames_of(log_id), disk=DISK, window=window))
        holes = [piece for piece in found if isinstance(piece, Hole)]
        assert [hole.upto for hole in holes] == [everything[3].start, size]  # type: ignore[union-attr]
        assert len(found) == 7


def test_the_next_frame_is_found_past_damage_though_its_first_bytes_lie_in_two_windows(folder: Path) -> None:
    path, log_id = files(folder)[1], log_id_of(folder)
    size = path.stat().st_size
    frames = list(FrameScanner(memoryview(path.read_bytes())))
    flip(path, frames[5].start + 10)  # a header: where its frame ends is not known
    away = frames[6].start - frames[5].start - 1
    for window in range(away, away + 7):
        found = walk(str(path), size, is_own=frames_of(log_id), disk=DISK, window=window)
        (hole,) = (piece for piece in found if isinstance(piece, Hole))
        assert (hole.at, hole.upto) == (frames[5].start, frames[6].start)


def test_a_frame_within_a_damaged_value_is_not_taken_for_one_of_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with WalLog.open(str(folder), background=False) as log:
        log.append_value(b"one").result()
        log.append_value(a_frame(folder, first=77, durable=70) * 3).result()
        log.append_value(b"three").result()
    path = files(folder)[0]
    frames = list(FrameScanner(memoryview(path.read_bytes())))
    flip(path, frames[2].end - 30)
    (finding,) = look(folder).damage
    assert finding.byte == frames[2].start
    assert "offset 1 is lost" in finding.message


# --- after crashes -----------------------------------------------------------------------------------------------


@pytest.fixture
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Do not log warnings: each of hundreds of torn tails would be one."""
    caplog.set_level(logging.ERROR)


def verified(disk: SimulatedDisk) -> WalVerification:
    return verify(FOLDER, env=Env(disk=disk, clock=ManualClock()))


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("mode", list(CrashMode))
def test_whatever_a_crash_leaves_is_no_damage_and_a_repair_does_what_it_planned(
    capsys: pytest.CaptureFixture[str], mode: CrashMode
) -> None:
    def mended(disk: SimulatedDisk, notes: list[Any]) -> None:
        if f"{FOLDER}/log.json" in disk.files():
            before = disk.files()
            assert verified(disk).damage == []
            plan = plan_repair(FOLDER, forget_slots=False, env=Env(disk=disk, clock=ManualClock()))
            assert disk.files() == before
            done = repair_log(
                FOLDER, forget_slots=False, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(1))
            )
            assert done == plan
            left = [finding.message for finding in verified(disk).findings if finding.kind is not FindingKind.PIECE]
            assert all("is the index of a file that does not exist" in message for message in left), left
        check(disk, notes)

    explored = crash_everywhere(workload, mended, modes=(mode,), seeds=(0,), limit=1)
    with capsys.disabled():
        print(f"\n  verified and mended: {explored}")
    assert explored.states > 20


@pytest.mark.usefixtures("_quiet")
def test_a_log_that_verifies_as_clean_can_be_opened_and_read_as_it_was_promised() -> None:
    outcomes = set()

    def hold_if_clean(disk: SimulatedDisk, notes: list[Any]) -> None:
        try:
            clean = verified(disk).is_clean
        except (NotALog, UnsupportedVersion):
            return
        if clean:
            check(disk, notes)
        outcomes.add(clean)

    damage_everywhere(workload, hold_if_clean, step=293, piece=b"\x5a\xa5\x5a")
    assert outcomes == {True, False}
