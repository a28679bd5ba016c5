"""Terms of records and of cursors in the write-ahead log, and frames as they were written."""

from __future__ import annotations

import pickle
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import CursorExpired, Diverged
from strandline.followers.run import follow
from strandline.followers.stores.state import MemoryStore
from strandline.log.memory import MemoryLog
from strandline.log.read.planning import cursor_after
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import WriterId
from strandline.model.records import RECORD_SCHEMA
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from tests.contracts.logs import records
from tests.disk_doubles import _PassingDisk

WRITER = WriterId(UUID(int=7))
TERMS = [1, 1, 1, 2, 2, 2, 2, 5, 5, 6]
"""Of the records at the offsets from 0 on."""


def opened(folder, **options):
    return WalLog.open(str(folder), **{"background": False, "roll_bytes": 1200, **options})


class CountingDisk(_PassingDisk):
    """A disk that remembers what was read."""

    def __init__(self):
        super().__init__(DISK)
        self.reads = []

    def read(self, path, start=0, length=None):
        self.reads.append((path, start, length))
        return super().read(path, start, length)


def grow(log, terms=TERMS):
    for term in terms:
        log.append_value(b"%d" % log.bounds().next + bytes(300), term=term).result()


@pytest.fixture(params=["memory", "disk", "reader"])
def log(request, tmp_path):
    """A log with records of several terms, which are in memory, on the disk, or read by another process."""
    with opened(tmp_path, tail_bytes=0 if request.param == "disk" else 1 << 20) as found:
        grow(found)
        yield WalReader(str(tmp_path)) if request.param == "reader" else found


class TestTerms:
    def test_each_record_has_the_term_it_was_appended_in(self, log):
        assert [log.term_at(offset) for offset in range(10)] == TERMS
        assert log.term_at(10) is None
        assert log.term_at(-1) is None

    def test_a_term_ends_where_a_higher_one_begins(self, log):
        ends = {term: log.end_of_term(term) for term in range(8)}
        assert ends == {0: 0, 1: 3, 2: 7, 3: 7, 4: 7, 5: 9, 6: 10, 7: 10}

    def test_what_was_trimmed_has_no_term_but_the_last_of_it_where_a_file_begins(self, tmp_path):
        with opened(tmp_path) as log:
            grow(log)
            log.trim(5)
            assert [log.term_at(offset) for offset in range(3, 8)] == [None, 2, 2, 2, 5]
            assert [log.end_of_term(term) for term in range(7)] == [5, 5, 7, 7, 7, 9, 10]
            log.trim(10)
            assert [log.end_of_term(term) for term in (0, 5, 6, 9)] == [10, 10, 10, 10]

    def test_the_end_of_a_term_is_found_without_reading_the_log(self, tmp_path):
        with opened(tmp_path, roll_bytes=60_000) as log:
            for term in range(1, 60):
                for _ in range(25):
                    log.append_value(bytes(100), term=term)
                log.slots.flush()
                log.append_value(b"", term=term).result()
        disk = CountingDisk()
        reader = WalReader(str(tmp_path), env=Env(disk=disk))
        for term in (0, 1, 7, 30, 58, 59):
            disk.reads.clear()
            assert reader.end_of_term(term) == term * 26
            assert len(disk.reads) < 16, disk.reads


class TestCursors:
    def test_the_term_of_the_record_below_it_is_what_a_cursor_has_to_say(self, log):
        for offset in range(1, 11):
            for term in range(8):
                cursor = Cursor(log.log_id, offset, term)
                if term in (0, TERMS[offset - 1]):
                    assert [span.first for span in log.plan(cursor)] == list(range(offset, 10))
                else:
                    with pytest.raises(Diverged, match="bootstrap again"):
                        log.plan(cursor)

    def test_limits_hold_whether_or_not_the_term_is_known(self, log):
        for term in (0, 2):
            spans = log.plan(Cursor(log.log_id, 4, term), Limit(records=2))
            assert [(span.first, span.next, span.term) for span in spans] == [(4, 5, 2), (5, 6, 2)]
            assert log.plan(Cursor(log.log_id, 4, term), Limit(upto=4)) == []

    def test_a_cursor_within_a_frame_is_of_its_term(self, tmp_path):
        with opened(tmp_path) as log:
            log.append_batch(records(b"a", b"b", b"c"), term=3).result()
            assert [(span.first, span.next) for span in log.plan(Cursor(log.log_id, 1, 3))] == [(1, 3)]
            with pytest.raises(Diverged):
                log.plan(Cursor(log.log_id, 1, 2))

    def test_where_the_record_below_is_gone_only_a_term_that_cannot_be_is_refused(self, tmp_path):
        with opened(tmp_path) as log:
            grow(log)
            log.trim(4)
            for term in (0, 1, 2):
                assert log.plan(Cursor(log.log_id, 4, term))[0].first == 4
            for term in (3, 6, 7):
                with pytest.raises(Diverged):
                    log.plan(Cursor(log.log_id, 4, term))
            with pytest.raises(CursorExpired):
                log.plan(Cursor(log.log_id, 3, 2))
            log.trim(10)
            assert log.plan(Cursor(log.log_id, 10, 6)) == []
            with pytest.raises(Diverged):
                log.plan(Cursor(log.log_id, 10, 7))

    def test_a_cursor_at_the_end_of_another_history_is_refused_even_if_there_is_nothing_to_read(self, tmp_path):
        with opened(tmp_path) as log:
            grow(log, [1, 1, 2])
            assert log.plan(log.end()) == []
            with pytest.raises(Diverged):
                log.plan(Cursor(log.log_id, 3, 1))

    def test_a_plan_costs_as_many_reads_with_a_term_as_without(self, tmp_path):
        with opened(tmp_path, roll_bytes=1 << 20) as log:
            grow(log, [1] * 50)
        disk = CountingDisk()
        reader = WalReader(str(tmp_path), env=Env(disk=disk))
        counts = []
        for term in (0, 1):
            reader.plan(Cursor(reader.log_id, 30, term), Limit(batches=1))
            disk.reads.clear()
            reader.plan(Cursor(reader.log_id, 30, term), Limit(batches=1))
            counts.append(len(disk.reads))
        assert counts[0] == counts[1]


class TestFollowing:
    def test_a_follower_stores_the_term_of_the_last_record_that_it_applied(self, tmp_path):
        with opened(tmp_path) as log:
            for offset, term in enumerate(TERMS):
                log.append_batch(pa.table({"key": [b"%d" % offset], "value": [b"v"]}), term=term).result()
            store = MemoryStore()
            for until in (1, 3, 4, 10):
                assert follow(log, store, upto=until) == Cursor(log.log_id, until, TERMS[until - 1])
                assert store.cursor(log.log_id) == Cursor(log.log_id, until, TERMS[until - 1])

    def test_reading_goes_over_terms_from_a_cursor_that_has_one(self, log):
        found = log.read(Cursor(log.log_id, 2, 1))
        assert [offset for batch in found for offset in batch.column("offset").to_pylist()] == list(range(2, 10))

    def test_a_span_of_a_log_without_terms_leaves_the_cursors_own(self):
        log = MemoryLog()
        log.append(records(b"a", b"b"), writer=WRITER, number=0).result()
        since = Cursor(log.log_id, 0, 4)
        assert cursor_after(since, log.plan(since)[-1]) == Cursor(log.log_id, 2, 4)


def test_the_term_before_the_start_is_known_though_its_file_goes_while_it_is_looked_up(tmp_path, monkeypatch):
    with opened(tmp_path / "log") as log:
        grow(log, [2] * 5)
        catalog, frames = log._catalog, log._catalog.frames

        def trimmed_first(*range_: int) -> object:
            log.trim(5)
            return frames(*range_)

        monkeypatch.setattr(catalog, "frames", trimmed_first)
        assert catalog.term_before(5) == 2


class TestBatches:
    @pytest.mark.parametrize("where", ["memory", "disk", "pickled"])
    def test_a_span_gives_its_frame_as_it_was_written(self, tmp_path, where):
        with opened(tmp_path, tail_bytes=0 if where == "disk" else 1 << 20) as log:
            # So many that they stay two pages: a few records would be joined into one.
            values = [b"%d" % number for number in range(9)]
            table = pa.Table.from_batches([records(*values[:8]), records(values[8])])
            table = table.replace_schema_metadata({"mine": "x"})
            log.append_batch(table, writer=WRITER, number=0, term=3, timestamp=12_345).result()
            for value in (b"d", b"e"):
                handle = log.append_value(value)
            handle.result()
            spans = log.plan(Cursor(log.log_id, 1), Limit(upto=10))
            if where == "pickled":
                spans = pickle.loads(pickle.dumps(spans))
            whole, single = (span.batch() for span in spans)
        assert (whole.first, whole.next, whole.term, whole.timestamp) == (0, 9, 3, 12_345)
        assert whole.append == (WRITER, 0)
        assert all(batch.schema.equals(RECORD_SCHEMA, check_metadata=True) for batch in whole.batches)
        assert [batch.num_rows for batch in whole.batches] == [8, 1]
        assert pa.Table.from_batches(whole.batches)["value"].to_pylist() == values
        assert (single.first, single.count, single.append) == (9, 2, None)
        assert pa.Table.from_batches(single.batches)["value"].to_pylist() == [b"d", b"e"]

    def test_records_in_memory_are_not_read_from_the_disk(self, tmp_path):
        disk = CountingDisk()
        with opened(tmp_path, env=Env(disk=disk)) as log:
            log.append(records(b"a"), writer=WRITER, number=0).result()
            disk.reads.clear()
            assert [span.batch().append for span in log.plan(log.start())] == [(WRITER, 0)]
            assert not disk.reads

    def test_a_copy_made_of_batches_has_the_same_frames(self, tmp_path):
        with opened(tmp_path / "log") as log, opened(tmp_path / "copy") as copy:
            grow(log, [1, 2])
            log.append(records(b"a", b"b"), writer=WRITER, number=0).result()
            for span in log.plan(log.start()):
                found = span.batch()
                table = pa.Table.from_batches(found.batches)
                writer, number = found.append or (None, None)
                copy.append_batch(
                    table, writer=writer, number=number, expect=found.first, term=found.term, timestamp=found.timestamp
                ).result()
            assert [span.frame[2:] for span in copy.plan(copy.start())] == [
                span.frame[2:] for span in log.plan(log.start())
            ]
            assert (copy.end().next, copy.end().term) == (log.end().next, log.end().term)
