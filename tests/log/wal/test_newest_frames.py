"""Reading the newest frames of a write-ahead log, as a primary's feeds and a replica's acknowledgements do."""

import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.node.wire import content_checksum, decode_note
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.span import whole_batches
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.node.flight.wire.streams import parts as parts_of
from strandline.storage.env import Env
from tests.contracts.logs import records, writer_named
from tests.contracts.logs.batches import SOON
from tests.disk_doubles import RecordingDisk
from tests.log.wal.workload import HeldSyncs


def told(batches):
    return [(found.first, found.next, found.term, found.timestamp, found.append, found.batches) for found in batches]


def test_the_newest_batches_are_those_that_a_plan_gives(tmp_path):
    with WalLog.open(str(tmp_path / "log")) as log:
        for number in range(100):
            log.append(records(b"a" * number, b"b"), writer=writer_named(1), number=number).result(SOON)
            log.append_value(b"%d" % number).result(SOON)
        for since, size in product((0, 1, 2, 3, 150, 299), (1, 700, 5000, 1 << 20)):
            planned = whole_batches(log.plan(Cursor(log.log_id, since)))
            newest = []
            while not newest or newest[-1].next < 300:
                some = log.newest(newest[-1].next if newest else since, size)
                assert len(some) == 1 or sum(batch.size for batch in some) <= size
                newest += some
            assert told(newest) == told(planned)


def test_what_is_not_in_memory_or_not_retained_is_left_to_a_plan(tmp_path):
    with WalLog.open(str(tmp_path / "log"), tail_bytes=3000, roll_bytes=1000) as log:
        for _ in range(30):
            log.append_batch(records(b"x" * 100)).result(SOON)
        assert log.newest(0, 1 << 20) == []
        assert log.newest(29, 1 << 20)[0].first == 29
        assert log.newest(30, 1 << 20) == []
        log.trim(30)
        assert log.newest(29, 1 << 20) == []


def test_nothing_of_a_group_that_is_not_durable_is_given(tmp_path):
    disk = HeldSyncs()
    with WalLog.open(str(tmp_path / "log"), env=Env(disk=disk)) as log:
        log.append_batch(records(b"a")).result(SOON)
        disk.hold()
        handle = log.append_batch(records(b"b"))
        assert disk.waiting.wait(SOON)
        assert [batch.next for batch in log.newest(0, 1 << 20)] == [1]
        disk.release()
        handle.result(SOON)


def test_records_that_are_being_synced_can_be_read_with_ahead(tmp_path):
    disk = HeldSyncs()
    with WalLog.open(str(tmp_path / "log"), env=Env(disk=disk)) as log:
        log.append_batch(records(b"a")).result(SOON)
        assert log.ahead(1, 1 << 20) == []
        disk.hold()
        handle = log.append(records(b"b", b"c"), writer=writer_named(1), number=0)
        assert disk.waiting.wait(SOON)
        (found,) = log.ahead(1, 1 << 20)
        assert [log.ahead(since, 1 << 20) for since in (0, 2, 3)] == [[], [], []]
        assert log.bounds().next == 1
        disk.release()
        handle.result(SOON)
        assert told([found]) == told(log.newest(1, 1 << 20))
        assert log.ahead(1, 1 << 20) == log.ahead(3, 1 << 20) == []


def test_a_waiter_for_written_records_does_not_wait_for_the_sync_and_others_do(tmp_path):
    disk = HeldSyncs()
    with WalLog.open(str(tmp_path / "log"), env=Env(disk=disk)) as log, ThreadPoolExecutor() as pool:
        disk.hold()
        early = pool.submit(log.wait_past, 0, 100 * SOON, written=0)
        late = pool.submit(log.wait_past, 0, 100 * SOON)
        handle = log.append_batch(records(b"a"))
        assert early.result(SOON)
        assert log.wait_past(0, SOON, written=0)
        assert not log.wait_past(0, 0.01, written=1)
        assert not late.done()
        next_one = pool.submit(log.wait_past, 0, 100 * SOON, written=1)
        disk.release()
        handle.result(SOON)
        assert late.result(SOON)
        assert next_one.result(SOON)


def test_nor_what_is_durable_and_was_not_shown_yet(tmp_path, monkeypatch):
    given = []
    with WalLog.open(str(tmp_path / "log")) as log:
        add = log._tail.add

        def adding(frames):
            add(frames)
            given.append((log.bounds().next, [batch.next for batch in log.newest(0, 1 << 20)]))

        monkeypatch.setattr(log._tail, "add", adding)
        for _ in range(2):
            log.append_batch(records(b"a")).result(SOON)
    assert given == [(0, []), (1, [1])]


def test_a_waiter_for_the_next_record_is_woken_by_it(tmp_path):
    with WalLog.open(str(tmp_path / "log")) as log, ThreadPoolExecutor() as pool:
        for end in range(1, 50):
            waiting = [pool.submit(log.wait, Cursor(log.log_id, end - 1), 100 * SOON) for _ in range(3)]
            log.append_batch(records(b"a")).result(SOON)
            assert [each.result(SOON) for each in waiting] == [True] * 3
        assert not log.wait(log.end(), 0)
        assert not log.wait(log.end(), 0.01)


def test_the_checksums_that_it_sends_on_are_those_of_the_records(tmp_path):
    with WalLog.open(str(tmp_path / "log")) as log:
        small, large = records(b"a", b""), records(bytes(1 << 17))
        for batch in (small, small.slice(1, 1), large):
            log.append_batch(batch).result(SOON)
        found = log.newest(0, 1 << 20)
        assert [batch.checksums for batch in found] == [
            (content_checksum(small),),
            (content_checksum(small.slice(1, 1)),),
            None,
        ]


def test_a_new_end_is_reported_when_it_is_durable_and_before_readers_see_it(tmp_path):
    told = []

    def durable(upto):
        told.append((upto, log.bounds().next, disk.events[-1]))

    disk = RecordingDisk()
    with WalLog.open(str(tmp_path / "log"), background=False, durable=durable, env=Env(disk=disk)) as log:
        log.append_batch(records(b"a", b"b")).result(SOON)
        handles = [log.append_batch(records(b"c")) for _ in range(3)]
        handles[-1].result(SOON)
    assert [row[:2] for row in told] == [(2, 0), (5, 2)]
    assert {event.action for *_, event in told} == {"sync"}


def test_a_copy_is_written_as_the_pages_that_came_with_it(tmp_path):
    batch = records(b"a", b"b")
    page = encode_page(batch, Compression.NONE)
    with WalLog.open(str(tmp_path / "one")) as one, WalLog.open(str(tmp_path / "two")) as two:
        one.append_copy(LogBatch(0, 3, 77, None, (batch,))).result(SOON)
        two.append_copy(LogBatch(0, 3, 77, None, (batch,), (page,))).result(SOON)
        (first,), (second,) = (whole_batches(log.plan(log.start())) for log in (one, two))
        assert first.batches == second.batches == (batch,)
        sizes = {log.plan(log.start())[0].size for log in (one, two)}
        assert len(sizes) == 1


def test_a_batch_that_is_read_from_the_disk_brings_its_pages_as_they_are_stored(tmp_path):
    parts = (records(b"a", b"b"), records(b"c" * 100_000), records(None))
    with WalLog.open(str(tmp_path / "log")) as log:
        log.append_copy(LogBatch(0, 3, 77, None, parts)).result(SOON)
        log.append_copy(LogBatch(4, 3, 77, None, parts[:1])).result(SOON)
    with WalLog.open(str(tmp_path / "log"), tail_bytes=0) as log:
        first, second = whole_batches(log.plan(log.start()))
    assert first.batches == parts
    stored = [b"".join(page) for page in (*first.pages, *second.pages)]
    assert stored == [part.serialize().to_pybytes() for part in (*parts, parts[0])]


def test_a_page_with_the_layout_of_another_arrow_is_encoded_again_by_its_sender(tmp_path):
    batch = records(b"a", b"b")
    message = batch.serialize().to_pybytes()
    _, head = struct.unpack_from("<II", message)
    body = len(message) - 8 - head
    told, more = struct.pack("<q", body), struct.pack("<q", body + 64)
    wide = message.replace(told, more, 1) + bytes(64)  # the first is the length of the body
    with WalLog.open(str(tmp_path / "log")) as log:
        log.append_copy(LogBatch(0, 3, 77, None, (batch,), ([wide],))).result(SOON)
    with WalLog.open(str(tmp_path / "log"), tail_bytes=0) as log:
        (span,) = log.plan(log.start())
        found = span.batch()
    assert span.cached is None
    assert found.batches == (batch,)
    ((sent, note),) = parts_of(found, None)
    assert sent == message
    assert decode_note(note, "it").content == content_checksum(batch)
