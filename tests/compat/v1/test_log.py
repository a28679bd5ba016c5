"""A queue of version 1 as a log: the calls that it supports, and the errors of the others."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.compat.v1.edits import time_of
from strandline.compat.v1.log import QueueLog, open_queue
from strandline.compat.v1.queue import V1Queue
from strandline.errors import (
    AlreadyExists,
    CorruptData,
    CursorExpired,
    Diverged,
    ExpectationFailed,
    Fenced,
    InvalidInput,
    NotFound,
    ProducerFailed,
    StorageError,
    UnsupportedVersion,
)
from strandline.log.contract import Handle, Log, Slot
from strandline.model.cursor import Bounds, Cursor, Limit, Span
from strandline.model.head import MetadataRange, QueueEntry, QueueManifest
from strandline.model.records import READ_SCHEMA, Op
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.compat.v1.filled_queues import (
    append,
    content,
    encode_manifest,
    fill,
    manifest_in,
    opened,
    paths,
    sequences,
    values,
    writer,
)


@pytest.fixture
def store() -> PlainStore:
    return PlainStore()


@pytest.fixture
def log(store) -> QueueLog:
    return opened(store)


@pytest.fixture
def filled(store) -> QueueLog:
    """Batches 5, 6 and 7 of another implementation."""
    fill(store, (b"a", b"b"), (b"c",), (b"d", b"", b"f"), first=5)
    return opened(store)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_opening_and_reading_write_nothing(store):
    calls = FaultyStore(store)
    log = opened(calls)
    assert calls.log == []
    assert log.bounds() == Bounds(0, 0)
    assert log.plan(log.start()) == []
    assert list(log.read()) == []
    assert not log.wait(log.end(), 0.0)
    assert {row.name for row in calls.log} <= {"get", "list"}
    assert paths(store) == []


def test_an_absent_manifest_is_an_empty_queue_and_a_damaged_one_is_not(store, log):
    assert log.manifest() == QueueManifest()
    store.put("ingest/manifest", b"")
    with pytest.raises(CorruptData, match="plain://test/ingest/manifest"):
        log.bounds()
    store.put("ingest/manifest", encode_manifest(QueueManifest())[:-2] + b"\x02\x00")
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        log.plan(Cursor(log.log_id, 0))


def test_a_v1_log_satisfies_the_protocols(filled):
    assert isinstance(filled, Log)
    assert all(isinstance(span, Span) for span in filled.plan(filled.start()))
    assert isinstance(filled.append(values(b"x"), writer=writer(1), number=0), Handle)
    assert isinstance(filled.slots.claim("queue", "me"), Slot)


def test_offsets_are_sequences_of_batches(filled):
    assert filled.bounds() == Bounds(5, 8)
    assert (filled.start().next, filled.end().next) == (5, 8)
    assert content(filled) == [(5, b"a"), (5, b"b"), (6, b"c"), (7, b"d"), (7, b""), (7, b"f")]


def test_records_are_puts_of_values_at_their_ingestion_time(filled):
    table = pa.Table.from_batches(filled.read(), READ_SCHEMA)
    assert set(table["op"].to_pylist()) == {Op.PUT}
    assert table["key"].null_count == table["headers"].null_count == 6
    seconds = [stamp.timestamp() for stamp in table["timestamp"].to_pylist()]
    assert seconds == [5, 5, 6, 7, 7, 7]


def test_a_batch_without_metadata_is_at_the_time_in_its_name(store):
    clock = ManualClock()
    log = opened(store, clock=clock)
    append(log, b"a", number=0)
    (entry,) = log.manifest().entries
    bare = QueueManifest((QueueEntry(0, entry.location),), 1)
    store.put("ingest/manifest", encode_manifest(bare))
    (batch,) = log.read()
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [time_of(entry.location)] == [clock.now()]


def test_a_cursor_that_cannot_be_served_is_refused(filled):
    with pytest.raises(CursorExpired):
        filled.plan(filled.start().at(4))
    with pytest.raises(Diverged):
        filled.plan(filled.start().at(9))
    with pytest.raises(Diverged, match=str(filled.log_id)):
        filled.plan(Cursor(UUID(int=9), 6))


def ranges(spans):
    return [(span.first, span.next) for span in spans]


def test_plans_keep_to_their_limits(filled):
    everything = filled.plan(filled.start())
    assert ranges(everything) == [(5, 6), (6, 7), (7, 8)]
    assert [span.size for span in everything] == [17, 12, 21]
    assert ranges(filled.plan(filled.start(), Limit(upto=7))) == [(5, 6), (6, 7)]
    assert ranges(filled.plan(filled.start().at(6), Limit(upto=6))) == []
    for limit in (Limit(batches=2), Limit(records=2), Limit(bytes=29), Limit(bytes=49, batches=2)):
        assert ranges(filled.plan(filled.start(), limit)) == [(5, 6), (6, 7)]
    assert ranges(filled.plan(filled.start(), Limit(bytes=1))) == [(5, 6)]


def test_sizes_are_found_with_few_requests_wherever_the_objects_are(store):
    calls = FaultyStore(store)
    log = opened(calls)
    for number in range(20):
        append(log, b"%d" % number, number=number)
    elsewhere = QueueEntry(20, "other/place.batch")
    store.put(elsewhere.location, b"x" * 77)
    manifest = log.manifest()
    store.put("ingest/manifest", encode_manifest(QueueManifest((*manifest.entries, elsewhere), 21)))
    start = log.start()
    calls.log.clear()
    sizes = [span.size for span in log.plan(start)]
    assert sizes[:-1] == [next(store.list(entry.location)).size for entry in manifest.entries]
    assert sizes[-1] == 77
    assert [row.name for row in calls.log] == ["get", "list", "list"]


def test_a_missing_object_has_no_size_and_its_fetch_names_it(store, filled):
    store.delete("ingest/part-6.batch")
    spans = filled.plan(filled.start())
    assert [span.size for span in spans] == [17, 0, 21]
    with pytest.raises(NotFound, match=r"plain://test/ingest/part-6\.batch.*batch 6"):
        spans[1].fetch()


def test_a_batch_that_is_acknowledged_while_it_is_read_has_expired_rather_than_vanished(store, filled):
    reading = filled.read()
    next(reading)
    filled.slots.claim("queue", "me").advance(filled.end())
    for name in (6, 7):
        store.delete(f"ingest/part-{name}.batch")
    with pytest.raises(CursorExpired):
        list(reading)


@pytest.mark.parametrize("location", ["", "../secret", "/etc/passwd", "a//b", "a/../b"])
def test_a_location_that_can_be_no_object_is_not_found_and_can_be_set_aside(tmp_path, location):
    store = LocalStore(str(tmp_path / "queue"))
    store.put("ingest/manifest", encode_manifest(QueueManifest((QueueEntry(0, location),), 1)))
    log = opened(store)
    (entry,) = log.manifest().entries
    with pytest.raises(NotFound, match="listed as batch 0"):
        V1Queue(log).fetcher().fetch(entry)
    assert V1Queue(log).dead_letter(entry, "because").endswith(".json")


def test_columns_are_given_in_the_order_asked(filled):
    (span, *_) = filled.plan(filled.start())
    assert span.fetch(["value", "offset"])[0].to_pydict() == {"value": [b"a", b"b"], "offset": [5, 5]}
    with pytest.raises(InvalidInput, match="colour"):
        span.fetch(["colour"])


def test_large_batches_come_in_pages(store, log):
    count = 150_000
    append(log, *[b"x"] * count, number=0)
    batches = log.plan(log.start())[0].fetch()
    assert [batch.num_rows for batch in batches] == [65_536, 65_536, 18_928]
    assert sum(batch.num_rows for batch in log.read()) == count


def test_fetching_twice_and_elsewhere_gives_equal_batches(tmp_path):
    log = open_queue(str(tmp_path / "queue"))
    append(log, b"a", b"b", number=0)
    (span,) = log.plan(log.start())
    copy = pickle.loads(pickle.dumps(span))
    assert copy.fetch() == span.fetch() == span.fetch()
    again = pickle.loads(pickle.dumps(log))
    assert again.log_id == log.log_id
    assert content(again) == content(log)


def test_waiting_ends_when_another_thread_appends(tmp_path):
    log = open_queue(str(tmp_path / "queue"))
    begun = threading.Event()

    def wait() -> bool:
        begun.set()
        return log.wait(log.start(), 120.0)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert begun.wait(120)
        append(open_queue(str(tmp_path / "queue")), b"a", number=0)
        assert waiting.result(120)
    assert not log.wait(log.end(), 0.01)


def test_a_newcomer_can_ask_for_a_time(filled):
    second = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=6)
    assert filled.position_of(second) == 6
    assert filled.position_of(second + timedelta(microseconds=999)) == 6, "its times are whole milliseconds"
    assert filled.position_of(second + timedelta(microseconds=1000)) == 7
    assert filled.position_of(second + timedelta(seconds=5)) == 8
    assert filled.position_of("retained") == 5
    assert filled.position_of("beginning") == 0
    assert filled.position_of("now") == 8
    with pytest.raises(Diverged):
        filled.position_of(Cursor(UUID(int=1), 6))


# --- who it is -------------------------------------------------------------------------------------------------------


def test_all_openers_of_a_queue_agree_on_its_identity_and_other_queues_differ(tmp_path):
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    assert open_queue(here).log_id == open_queue(f"file://{here}").log_id == open_queue(f"{here}/").log_id
    ids = {
        open_queue(here).log_id,
        open_queue(there).log_id,
        open_queue(here, manifest="other/manifest").log_id,
    }
    assert len(ids) == 3
    assert open_queue("s3a://bucket/x").log_id == open_queue("s3://bucket/x/").log_id


def test_the_front_opens_it_by_its_format(tmp_path):
    log = sl.open(str(tmp_path / "queue"), format=sl.compat.QueueFormat("in/list", "in/data"))
    assert isinstance(log, QueueLog)
    append(log, b"a", number=0)
    assert sorted(path.parent.name for path in (tmp_path / "queue").rglob("*") if path.suffix == ".batch") == ["data"]
    assert (tmp_path / "queue/in/list").exists()
    assert isinstance(sl.open(str(tmp_path / "own"), create=True), sl.log.ObjectLog)
    with pytest.raises(InvalidInput, match="queue-v1"):
        sl.open(str(tmp_path / "queue"), format="queue-v2")


def test_an_impossible_path_or_grace_is_refused(store):
    for options in ({"manifest": "/x"}, {"data": ""}, {"data": "a/../b"}, {"grace": 0.0}):
        with pytest.raises(InvalidInput):
            open_queue(store, **options)


# --- appending -------------------------------------------------------------------------------------------------------


def test_an_append_is_one_object_and_one_entry(store):
    clock = ManualClock()
    log = opened(store, clock=clock)
    receipt = append(log, b"a", b"b", number=0)
    assert (receipt.first, receipt.count) == (0, 2)
    assert append(log, b"c", by=2, number=0).first == 1
    manifest = manifest_in(store)
    assert [entry.sequence for entry in manifest.entries] == [0, 1]
    assert manifest.entries[0].metadata == (MetadataRange(0, clock.now(), b""),)
    assert manifest == log.manifest()
    assert sorted(entry.location for entry in manifest.entries) == paths(store, "ingest/0")
    assert content(log) == [(0, b"a"), (0, b"b"), (1, b"c")]


def test_numbering_continues_where_others_have_left_it(store, filled):
    assert append(filled, b"x", number=0).first == 8
    assert sequences(filled) == [5, 6, 7, 8]
    assert manifest_in(store).entries[0].metadata[0].payload == b"m0"


def test_a_repeated_append_is_a_no_op_while_it_is_listed_in_whatever_process(store):
    first = append(opened(store, seed=1), b"a", number=0)
    later = ManualClock(now=1_800_000_000_000_000)
    again = append(opened(store, clock=later, seed=2), b"a", number=0)
    assert first == again
    assert sequences(opened(store)) == [0]


def test_a_repeated_append_is_not_recognised_once_it_was_acknowledged(store, log):
    append(log, b"a", number=0)
    log.slots.claim("queue", "me").advance(log.end())
    assert append(log, b"a", number=0).first == 1


def test_an_expected_end_is_a_sequence(filled):
    assert append(filled, b"x", number=0, expect=8).first == 8
    with pytest.raises(ExpectationFailed):
        append(filled, b"y", number=1, expect=8)
    assert sequences(filled) == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "batch",
    [
        pa.table({"key": [b"k"], "value": [b"v"]}),
        pa.table({"value": pa.array([None], pa.binary())}),
        pa.table({"value": [b"v"], "op": pa.array([1], pa.int8())}),
        pa.table({"value": pa.array([], pa.binary())}),
    ],
    ids=["key", "null", "delete", "nothing"],
)
def test_records_with_more_or_less_than_a_value_are_refused_and_change_nothing(store, log, batch):
    with pytest.raises(InvalidInput):
        log.append(batch, writer=writer(1), number=0)
    with pytest.raises(InvalidInput):
        log.append(values(b"a"), writer=writer(1), number=-1)
    with pytest.raises(InvalidInput, match="'zstd' or 'none'"):
        log.append(values(b"a"), writer=writer(1), number=0, compression="lz4")
    assert paths(store) == []


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_both_compressions_are_written_and_read(store, log, compression):
    entries = [b"entry %d " % number * 50 for number in range(100)]
    log.append(values(*entries), writer=writer(1), number=0, compression=compression).result(120)
    (entry,) = log.manifest().entries
    assert store.get(entry.location).data[-7] == ["none", "zstd"].index(compression)
    assert [value for _, value in content(log)] == entries


# --- the producer ----------------------------------------------------------------------------------------------------


def test_a_producer_lists_what_it_is_given_with_metadata(tmp_path):
    log = open_queue(str(tmp_path / "queue"))
    with log.producer(linger=30.0) as producer:
        handles = [producer.produce([b"a", b""], metadata=b"one"), producer.produce([b"c"], metadata=b"two")]
        producer.flush()
        single = producer.append(value=b"d")
    assert [handle.result(120).first for handle in (*handles, single)] == [0, 0, 1]
    assert [handle.result(120).count for handle in (*handles, single)] == [2, 1, 1]
    first, second = log.manifest().entries
    assert [(item.start, item.payload) for item in first.metadata] == [(0, b"one"), (2, b"two")]
    assert second.metadata == ()
    assert content(log) == [(0, b"a"), (0, b""), (0, b"c"), (1, b"d")]
    assert abs(first.metadata[0].ingested - handles[0].ingested) < 1000


def test_a_producer_refuses_at_the_call_what_a_queue_cannot_hold(tmp_path):
    log = open_queue(str(tmp_path / "queue"))
    with log.producer() as producer:
        for call in (
            lambda: producer.append(key=b"k", value=b"v"),
            lambda: producer.append(value=None),
            lambda: producer.append(value=b"v", op=Op.DELETE),
            lambda: producer.append(value=b"v", headers={"a": b"1"}),
            lambda: producer.append_batch(pa.table({"key": [b"k"], "value": [b"v"]})),
        ):
            with pytest.raises(InvalidInput):
                call()
        producer.produce([b"fine"])
    assert content(log) == [(0, b"fine")]
    with pytest.raises(InvalidInput, match="'zstd' or 'none'"):
        log.producer(compression="lz4")


def test_many_batches_of_several_producers_are_each_listed_once_and_in_order(tmp_path):
    place = str(tmp_path / "queue")

    def produce(name: int) -> None:
        with open_queue(place).producer(batch_bytes=2000, linger=0.001) as producer:
            for number in range(60):
                producer.produce([b"%d/%d" % (name, number), b"x" * 300])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(produce, range(3)))
    found = [value for _, value in content(open_queue(place)) if value[:1] != b"x"]
    for name in range(3):
        mine = [value for value in found if value.startswith(b"%d/" % name)]
        assert mine == [b"%d/%d" % (name, number) for number in range(60)]


def test_a_handle_can_be_awaited(tmp_path):
    async def main() -> int | None:
        with open_queue(str(tmp_path / "queue")).producer(linger=0.0) as producer:
            return (await producer.produce([b"a"])).first

    assert asyncio.run(main()) == 0


def test_a_producer_whose_store_refuses_fails_its_handles(store):
    line = FaultyStore(store)
    line.fail_next("put", times=100, error=StorageError("The disk is gone."))
    producer = open_queue(line).producer(linger=0.0)
    handle = producer.produce([b"a"])
    with pytest.raises(StorageError):
        handle.result(120)
    with pytest.raises((ProducerFailed, StorageError)):
        producer.close()
    assert "ingest/manifest" not in paths(store)


# --- the one slot ----------------------------------------------------------------------------------------------------


def test_a_queue_has_exactly_one_slot_that_was_always_there(filled):
    (state,) = filled.slots.list()
    assert (state.name, state.position, state.holder, state.epoch) == ("queue", 5, None, 0)
    assert filled.slots.floor() == 5
    with pytest.raises(AlreadyExists, match="queue"):
        filled.slots.create("queue", 5)
    with pytest.raises(InvalidInput, match=r"one slot, 'queue'.*upgrade"):
        filled.slots.create("billing", 5)
    for action in (lambda: filled.slots.claim("billing", "me"), lambda: filled.slots.reset("billing", 5)):
        with pytest.raises(NotFound, match="billing"):
            action()
    with pytest.raises(InvalidInput, match="cannot be dropped"):
        filled.slots.drop("queue")
    assert filled.slots.list() == [state]


def test_claiming_raises_the_epoch_and_fences_the_former_holder(filled):
    old = filled.slots.claim("queue", "a")
    new = filled.slots.claim("queue", "b")
    assert (old.epoch, new.epoch) == (1, 2)
    for action in (lambda: old.advance(filled.start().at(6)), old.touch):
        with pytest.raises(Fenced):
            action()
    new.touch()
    new.advance(filled.start().at(6))
    assert new.state().position == filled.slots.floor() == 6


def test_claiming_again_is_idempotent_for_the_same_holder_of_one_object(filled):
    assert filled.slots.claim("queue", "a").epoch == filled.slots.claim("queue", "a").epoch == 1
    filled.slots.claim("queue", "b")
    assert filled.slots.claim("queue", "a").epoch == 3
    with pytest.raises(InvalidInput):
        filled.slots.claim("queue", "")


def test_advancing_acknowledges_and_a_lower_cursor_changes_nothing(store, filled):
    slot = filled.slots.claim("queue", "a")
    slot.advance(filled.start().at(7))
    assert [entry.sequence for entry in manifest_in(store).entries] == [7]
    before = manifest_in(store)
    for lower in (7, 5, 0):
        slot.advance(Cursor(filled.log_id, lower))
    assert manifest_in(store) == before
    with pytest.raises(Diverged):
        slot.advance(Cursor(filled.log_id, 9))
    slot.advance(filled.end())
    assert filled.bounds() == Bounds(8, 8)
    assert append(filled, b"x", number=0).first == 8


def test_a_reset_acknowledges_and_fences_and_cannot_go_back(filled):
    slot = filled.slots.claim("queue", "a")
    assert filled.slots.reset("queue", 6).position == 6
    with pytest.raises(Fenced):
        slot.touch()
    with pytest.raises(CursorExpired):
        filled.slots.reset("queue", 5)


class Rows:
    """A sink in memory that follows the contract."""

    mode = "append"

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes]] = []
        self.at: Cursor | None = None

    def cursor(self, log_id: UUID) -> Cursor | None:
        return self.at

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        self.rows += zip(records["offset"].to_pylist(), records["value"].to_pylist(), strict=True)
        self.at = upto


def test_a_sink_can_follow_a_queue_and_acknowledges_what_it_has_stored(store, filled):
    sink = Rows()
    with pytest.raises(CursorExpired):
        sl.follow(filled, sink, slot="queue", upto="end", env=Env(clock=ManualClock()))
    sl.follow(filled, sink, slot="queue", start="retained", upto="end", env=Env(clock=ManualClock()))
    assert sink.rows == [(5, b"a"), (5, b"b"), (6, b"c"), (7, b"d"), (7, b""), (7, b"f")]
    assert manifest_in(store).entries == ()
    append(filled, b"g", number=0)
    sl.follow(filled, sink, slot="queue", upto="end", env=Env(clock=ManualClock()))
    assert sink.rows[-1] == (8, b"g")
    assert len(sink.rows) == 7
    with pytest.raises(InvalidInput, match="one slot"):
        sl.follow(filled, sink, slot="billing", upto="end", env=Env(clock=ManualClock()))


def test_a_batch_that_another_implementation_stored_under_an_encoded_name_is_read(store):
    log = open_queue(store)
    log.append(values(b"a"), writer=writer(1), number=0).result(120)
    (entry,) = manifest_in(store).entries
    store.put("in%7Egest/x.batch", store.get(entry.location).data)
    manifest = QueueManifest((QueueEntry(0, "in~gest/x.batch"),), 1)
    store.put("ingest/manifest", encode_manifest(manifest))
    assert [batch.column("value").to_pylist() for batch in log.read()] == [[b"a"]]


def test_a_consumer_of_a_queue_whose_epochs_ran_out_is_refused_and_nothing_is_written(store):
    data = encode_manifest(QueueManifest(epoch=2**64 - 1))
    store.put("ingest/manifest", data)
    with pytest.raises(CorruptData, match="epoch"):
        sl.Consumer(opened(store))
    assert bytes(store.get("ingest/manifest").data) == data
