"""Guarantees of the write-ahead log beyond the contract of logs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import (
    CursorExpired,
    Diverged,
    ExpectationFailed,
    Fenced,
    InvalidInput,
    LogClosed,
)
from strandline.formats.wal.frame import MAX_PAYLOAD
from strandline.formats.wal.index import decode_index, new_chain
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import data_name, index_name
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.write.journal import INDEX_BYTES, INDEX_FRAMES
from strandline.model.cursor import Cursor, Limit
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash
from strandline.testing.simdisk import CrashMode, SimulatedDisk
from tests.contracts.logs import append, records, writer_named
from tests.contracts.logs.batches import SOON
from tests.disk_doubles import RecordingDisk, _PassingDisk
from tests.log.wal.workload import FOLDER, HeldSyncs, open_on, payload, values
from tests.matrix_cases import some


@pytest.fixture
def wal(tmp_path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        yield wal


def lsns(found):
    return [record.lsn for record in found]


class TestAppending:
    def test_lsns_begin_at_1_and_leave_no_gap(self, wal):
        assert wal.current == 0
        assert wal.append(b"a") == 1
        assert wal.append_many([b"b", b"c"]) == range(2, 4)
        assert wal.append_batch(records(b"d", b"e")) == range(4, 6)
        assert wal.append_many([]) == range(6, 6)
        assert wal.submit(b"f").result(SOON) == 6
        assert [(found.lsn, found.payload) for found in wal.read_since(0)] == list(
            enumerate([b"a", b"b", b"c", b"d", b"e", b"f"], 1)
        )

    def test_a_buffer_is_copied_before_its_owner_can_change_it(self, wal):
        buffer = bytearray(b"before")
        handle = wal.submit(buffer)
        buffer[:] = b"after!"
        handle.result(SOON)
        assert wal.read_since(0)[0].payload == b"before"

    @pytest.mark.parametrize("value", ["text", None, 7, [b"a"]])
    def test_a_value_that_is_no_payload_is_refused(self, wal, value):
        with pytest.raises(InvalidInput):
            wal.append(value)
        assert wal.current == 0

    @pytest.mark.matrix
    def test_over_256_mib_is_refused_before_anything_is_written(self, wal):
        too_large = bytes(MAX_PAYLOAD)
        for refused in (
            lambda: wal.append(too_large),
            lambda: wal.append_many([too_large[: MAX_PAYLOAD // 2]] * 2),
            lambda: wal.append_batch(records(too_large[: MAX_PAYLOAD // 2], too_large[: MAX_PAYLOAD // 2])),
        ):
            with pytest.raises(InvalidInput, match="268,435,456"):
                refused()
        assert wal.current == 0
        assert wal.append(b"a") == 1

    def test_an_explicit_lsn_that_follows_is_taken_and_another_is_refused_with_the_expected_one(self, wal):
        assert wal.append(b"a", lsn=1) == 1
        for wrong in (1, 3, 99):
            with pytest.raises(ExpectationFailed, match="the next one is 2"):
                wal.append(b"b", lsn=wrong)
            with pytest.raises(ExpectationFailed, match="the next one is 2"):
                wal.append_batch(records(b"b", b"c"), lsn=wrong)
        with pytest.raises(InvalidInput):
            wal.append(b"b", lsn=0)
        assert wal.append_batch(records(b"b", b"c"), lsn=2) == range(2, 4)

    @pytest.mark.parametrize(
        "numbers",
        [{name: value} for name in ("lsn", "term", "timestamp") for value in (-1, 1 << 63, 1.0, "1", True)],
    )
    def test_a_number_that_no_frame_can_hold_is_refused_and_the_log_continues(self, wal, numbers):
        with pytest.raises(InvalidInput):
            wal.append(b"a", **numbers)
        with pytest.raises(InvalidInput):
            wal.append_batch(records(b"a"), **numbers)
        with pytest.raises(InvalidInput):
            wal.log.append(records(b"a"), writer=writer_named(1), number=1 << 63)
        assert wal.append(b"a") == 1

    def test_terms_never_go_down(self, wal):
        wal.append(b"a", term=3)
        wal.append(b"b")
        for term in (0, 2):
            with pytest.raises(Fenced, match="term 3"):
                wal.append(b"c", term=term)
            with pytest.raises(Fenced, match="term 3"):
                wal.append_batch(records(b"c"), term=term)
        wal.append_batch(records(b"c"), term=7)
        assert [record.term for record in wal.read_since(0)] == [3, 3, 7]
        assert wal.log.end() == Cursor(wal.log.log_id, 3, 7)

    def test_the_term_is_kept_when_the_log_is_opened_again(self, tmp_path):
        with WriteAheadLog.open(tmp_path) as wal:
            wal.append(b"a", term=5)
            wal.prune_through(1)
        with WriteAheadLog.open(tmp_path) as wal:
            with pytest.raises(Fenced):
                wal.append(b"b", term=4)
            wal.append(b"b")
            assert wal.read_since(1)[0].term == 5

    def test_a_cursor_of_a_later_term_has_diverged(self, wal):
        wal.append(b"a", term=2)
        wal.log.plan(Cursor(wal.log.log_id, 1, 2))
        with pytest.raises(Diverged, match="term 3"):
            wal.log.plan(Cursor(wal.log.log_id, 1, 3))

    def test_a_timestamp_is_kept_to_the_millisecond(self, wal):
        wal.append(b"a", timestamp=1_234_567)
        batch = records(b"b")
        wal.append_batch(batch, timestamp=2_000_000)
        assert wal.read_since(0)[0].timestamp == 1_234_567

    @pytest.mark.parametrize("first", [1, 2, 1000])
    def test_a_log_that_never_held_a_record_accepts_any_first_lsn(self, tmp_path, first):
        with WriteAheadLog.open(tmp_path) as wal:
            assert wal.append(b"a", lsn=first) == first
            assert wal.append(b"b") == first + 1
            assert (wal.oldest, wal.current) == (first, first + 1)
        with WriteAheadLog.open(tmp_path) as wal:
            assert (wal.oldest, wal.current) == (first, first + 1)
            assert lsns(wal.read_since(first - 1)) == [first, first + 1]
            if first > 1:
                with pytest.raises(CursorExpired):
                    wal.read_since(0)

    def test_a_trimmed_log_continues_where_it_was(self, wal):
        wal.append_many([b"a", b"b"])
        wal.prune_through(2)
        with pytest.raises(ExpectationFailed, match="the next one is 3"):
            wal.append(b"c", lsn=1)
        assert wal.append(b"c", lsn=3) == 3

    def test_all_appends_that_arrive_while_a_sync_runs_share_the_next_one(self, tmp_path):
        disk = HeldSyncs(recorded := RecordingDisk())
        with WalLog.open(str(tmp_path), env=Env(disk=disk)) as log, ThreadPoolExecutor(33) as pool:
            disk.hold()
            first = pool.submit(lambda: log.append_value(b"0").result(SOON))
            assert disk.waiting.wait(SOON)
            before = len([event for event in recorded.events if event.action == "sync"])
            others = [log.append_value(b"%d" % number) for number in range(1, 200)]
            assert not any(handle.done() for handle in others)
            disk.release()
            assert first.result(SOON).first == 0
            assert [handle.result(SOON).first for handle in others] == list(range(1, 200))
            after = len([event for event in recorded.events if event.action == "sync"])
            assert after - before == 2
            assert [span.next for span in log.plan(log.start())] == [1, 200]  # one frame for the group

    def test_a_handle_that_is_not_durable_in_time_raises_and_can_be_asked_again(self, tmp_path):
        disk = HeldSyncs()
        with WalLog.open(str(tmp_path), env=Env(disk=disk)) as log:
            disk.hold()
            handle = log.append_value(b"a")
            with pytest.raises(TimeoutError):
                handle.result(0.01)
            assert not handle.done()
            disk.release()
            assert handle.result(SOON).first == 0

    def test_appends_are_durable_after_closing_though_no_thread_waited(self, tmp_path):
        wal = WriteAheadLog.open(tmp_path)
        handles = [wal.submit(b"%d" % number) for number in range(50)]
        wal.close()
        assert all(handle.done() for handle in handles)
        wal.close()
        with pytest.raises(LogClosed):
            wal.append(b"x")
        with WriteAheadLog.open(tmp_path) as wal:
            assert wal.current == 50


class TestReading:
    def test_read_since_is_exclusive_and_bounded(self, wal):
        wal.append_many([b"%d" % number for number in range(10)])
        wal.append(b"10")
        assert lsns(wal.read_since(0)) == list(range(1, 12))
        assert lsns(wal.read_since(4, 3)) == [5, 6, 7]
        assert lsns(wal.read_since(9, 5)) == [10, 11]
        assert wal.read_since(11) == []
        with pytest.raises(Diverged):
            wal.read_since(12)
        with pytest.raises(InvalidInput):
            wal.read_since(0, 0)

    def test_reading_below_what_is_retained_is_expired_not_the_rest(self, wal):
        wal.append_many([b"a", b"b", b"c"])
        assert wal.prune_through(2) == 2
        assert lsns(wal.read_since(2)) == [3]
        for lsn in (0, 1):
            with pytest.raises(CursorExpired):
                wal.read_since(lsn)

    @pytest.mark.parametrize("size", [1, 3000])
    def test_an_index_has_a_checkpoint_at_least_every_64_frames_and_every_mebibyte(self, tmp_path, size):
        with WalLog.open(str(tmp_path), background=False) as log:
            for number in range(700):
                log.append_batch(records(bytes(size) + b"%d" % number)).result()
            frames = log.plan(log.start())
        index = decode_index(DISK.read(f"{tmp_path}/{index_name(0)}"), new_chain(log.log_id, 0))
        places = {span.frame.position: span.first for span in frames}
        starts = [(0, 0), *((entry.position, entry.offset) for entry in index.entries)]
        assert all(places[position] == offset for position, offset in starts[1:-1])
        for (position, offset), (after, next_offset) in pairwise(starts):
            assert next_offset - offset <= INDEX_FRAMES
            assert after - position <= INDEX_BYTES + 3000 + 1000
        assert 700 - starts[-1][1] < INDEX_FRAMES

    def test_reading_a_few_records_costs_about_that_wherever_they_are(self, tmp_path):
        with WalLog.open(str(tmp_path), background=False, tail_bytes=0) as log:
            for number in range(3000):
                log.append_value(b"%d" % number).result()
        disk = CountingDisk()
        reader = WalReader(str(tmp_path), env=Env(disk=disk))
        costs = []
        for since in (5, 1500, 2990):
            reader.plan(Cursor(reader.log_id, since), Limit(records=5))  # learns the index
            disk.bytes = 0
            spans = reader.plan(Cursor(reader.log_id, since), Limit(records=5))
            assert [offset for span in spans for offset in span.fetch()[0]["offset"].to_pylist()] == list(
                range(since, since + 5)
            )
            costs.append(disk.bytes)
        assert max(costs) < 300_000  # of three million
        assert DISK.size(f"{tmp_path}/{data_name(0)}") > 2_000_000

    def test_opening_reads_only_the_end_of_the_last_file(self, tmp_path):
        with WalLog.open(str(tmp_path), background=False, roll_bytes=1 << 20) as log:
            for number in range(400):
                log.append_value(bytes(10_000) + b"%d" % number).result()
        disk = CountingDisk()
        with WalLog.open(str(tmp_path), env=Env(disk=disk)) as log:
            assert log.bounds().next == 400
            assert disk.bytes < 1_500_000  # of four million
            assert {Path(path).name for path in disk.paths if path.endswith(".log")} == {
                data_name(log._catalog.firsts[-1])
            }

    def test_a_lost_index_changes_nothing_but_the_time_it_takes(self, tmp_path):
        with WalLog.open(str(tmp_path), background=False, roll_bytes=30_000, tail_bytes=0) as log:
            for number in range(300):
                log.append(records(b"%d" % number), writer=writer_named(number % 3), number=number // 3).result()
        for path in tmp_path.glob("*.index"):
            path.unlink()
        with WalLog.open(str(tmp_path), tail_bytes=0) as log:
            assert values(log) == {number: b"%d" % number for number in range(300)}
            assert append(log, b"again", writer=writer_named(2), number=99).first == 299

    @pytest.mark.parametrize("at", some([300, 0, 3, 8, 40], 1))
    def test_a_damaged_index_changes_nothing_either(self, tmp_path, at):
        with WalLog.open(str(tmp_path), background=False, tail_bytes=0) as log:
            for number in range(300):
                log.append(records(b"%d" % number), writer=writer_named(number % 3), number=number // 3).result()
        path = tmp_path / index_name(0)
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        for _ in range(2):
            with WalLog.open(str(tmp_path), tail_bytes=0) as log:
                assert values(log) == {number: b"%d" % number for number in range(300)}
                assert append(log, b"again", writer=writer_named(1), number=99).first == 298

    def test_a_writer_is_remembered_over_files_and_restarts(self, tmp_path):
        options = {"background": False, "roll_bytes": 5000}
        for number in range(40):
            with WalLog.open(str(tmp_path), **options) as log:
                assert append(log, b"x" * 300, number=number).first == number
                assert append(log, b"other", number=number).first == number
        with WalLog.open(str(tmp_path), **options) as log:
            assert len(log._catalog.firsts) > 3
            log.trim(40)
        with WalLog.open(str(tmp_path), **options) as log:
            assert append(log, b"x", number=39).first == 39
            assert append(log, b"x", number=40).first == 40

    def test_seeking_by_time_finds_the_first_frame_written_then_or_later(self, tmp_path):
        clock = ManualClock()
        with WalLog.open(str(tmp_path), background=False, roll_bytes=3000, env=Env(clock=clock), tail_bytes=0) as log:
            times = []
            for number in range(50):
                clock.advance(1.0)
                times.append(clock.now())
                log.append_value(b"%d" % number).result()
            for number in range(0, 50, 7):
                exactly = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=times[number])
                assert log.position_of(exactly) == number
                assert log.position_of(exactly - timedelta(milliseconds=500)) == number
                assert log.position_of(exactly + timedelta(milliseconds=500)) == number + 1

    def test_a_value_that_holds_frames_of_another_log_is_not_taken_for_the_log_s_own(self):
        other = SimulatedDisk()
        foreign = open_on(other)
        for offset in range(9):
            foreign.append_value(payload(offset)).result()
        frames = other.files()[f"{FOLDER}/{data_name(0)}"]
        disk = SimulatedDisk()
        log = WalLog.open(FOLDER, background=False, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(99)))
        log.append_value(b"first").result()
        end = disk.size(f"{FOLDER}/{data_name(0)}")
        disk.stop(len(disk.calls) + 1, moment="before")  # before the sync
        with pytest.raises(Crash):
            log.append_value(frames).result()
        disk.crash(CrashMode.KILL)
        disk.damage(f"{FOLDER}/{data_name(0)}", end + 2, b"?")
        log = WalLog.open(FOLDER, background=False, env=Env(disk=disk, clock=ManualClock(), chance=SeededChance(99)))
        assert values(log) == {0: b"first"}


class CountingDisk(_PassingDisk):
    def __init__(self) -> None:
        super().__init__(DISK)
        self.bytes = 0
        self.paths: list[str] = []

    def read(self, path, start=0, length=None):
        data = super().read(path, start, length)
        self.bytes += len(data)
        self.paths.append(path)
        return data


def test_waiting_ends_with_the_append_that_it_waits_for_and_not_before(tmp_path):
    disk = HeldSyncs()
    with WriteAheadLog.open(tmp_path, env=Env(disk=disk)) as wal, ThreadPoolExecutor(1) as pool:
        wal.append(b"a")
        assert wal.wait(0, 0)
        assert not wal.wait(1, 0.01)
        disk.hold()
        handle = wal.submit(b"b")
        assert disk.waiting.wait(SOON)
        waiting = pool.submit(wal.wait, 1, SOON)
        assert not wal.wait(1, 0)  # written, and not durable
        disk.release()
        assert waiting.result(SOON)
        assert handle.result(SOON) == 2
