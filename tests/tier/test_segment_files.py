"""Segments in a store: checked when they were copied, read as little as is needed, and never wrong in silence."""

import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.bulk.span_checks import CheckTask
from strandline.errors import CorruptData, InvalidInput, NotFound, TransientStorageError
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.model.cursor import Limit, Span
from strandline.model.records import READ_SCHEMA, record_batch, with_offsets
from strandline.model.segments import SegmentId, SegmentMetadata, TopicPartition
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ObjectStore, Payload
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.tier.copy import segment_files
from strandline.tier.copy.segment_files import (
    ColdSpan,
    forget_tails,
    list_segments,
    listed_since,
    load_tail,
    partition_prefix,
    plan_segment,
    seal_of,
    segment_path,
    verify_segment,
)
from tests import matrix_cases

PARTITION = TopicPartition("orders", UUID(int=77), 2)
ID = SegmentId(PARTITION, UUID(int=5))


@pytest.fixture(autouse=True)
def _no_tails() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


class CountingStore(PlainStore):
    """Counts the bytes and the requests that reading takes."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.requests = 0

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        self.requests += 1
        self.read += length
        return super().get_range(path, start, length)


def some(count: int, first: int, value: int) -> pa.RecordBatch:
    dice = random.Random(first)
    return record_batch(
        timestamps=[first + n for n in range(count)],
        ops=[n % 3 for n in range(count)],
        keys=[b"k%d" % (n % 7) for n in range(count)],
        values=[dice.randbytes(value) for n in range(count)],
        headers=[[("h", b"%d" % n)] if n % 2 else None for n in range(count)],
    )


def stored(
    store: ObjectStore,
    *counts: int,
    start: int = 10,
    value: int = 30,
    expected: int = 1 << 20,
    id: SegmentId = ID,  # noqa: A002
) -> tuple[SegmentMetadata, pa.Table]:
    writer = SegmentWriter(start, expected=expected)
    batches = []
    for number, count in enumerate(counts):
        numbered = with_offsets([some(count, writer.next, value)], writer.next)
        writer.add(numbered, term=number // 2, listed=1_000 * number)
        batches += numbered
    encoded = writer.finish(log_id=PARTITION.topic_id, partition=PARTITION.partition, segment=id.id)
    store.put(segment_path(id, start), encoded.parts)
    return told(encoded, id), pa.Table.from_batches(batches)


def told(encoded: EncodedSegment, segment: SegmentId = ID) -> SegmentMetadata:
    facts = encoded.facts
    return SegmentMetadata(
        segment=segment,
        start=facts.start,
        end=facts.end,
        broker=0,
        max_timestamp=facts.max_timestamp,
        event_timestamp=0,
        terms=facts.terms,
        size=encoded.seal.size,
        custom_metadata=encoded.seal.encode(),
    )


def path_of(segment: SegmentMetadata) -> str:
    return segment_path(segment.segment, segment.start)


def fetched(spans: list[ColdSpan], columns: list[str] | None = None) -> pa.Table:
    return pa.Table.from_batches([batch for span in spans for batch in span.fetch(columns)])


# --- names -----------------------------------------------------------------------------------------------------


def test_objects_are_named_by_log_partition_start_and_segment() -> None:
    assert segment_path(ID, 42) == f"{UUID(int=77)}/2/00000000000000000042-{UUID(int=5)}.parquet"


def test_listing_gives_the_segments_of_a_partition_in_order_and_nothing_else() -> None:
    store = PlainStore()
    other = TopicPartition("orders", UUID(int=77), 22)
    for start, number in ((300, 1), (20, 2), (20, 3)):
        store.put(segment_path(SegmentId(PARTITION, UUID(int=number)), start), b"x")
        store.put(segment_path(SegmentId(other, UUID(int=number)), start), b"x")
    for name in ("notes.txt", "20-3.parquet", f"{'1' * 20}-{'z' * 36}.parquet", f"{'1' * 20}-{'-' * 36}.parquet"):
        store.put(partition_prefix(UUID(int=77), 2) + name, b"x")
    found = list(list_segments(store, UUID(int=77), 2))
    assert [(row.info.path, row.id.int, row.info.size) for row in found] == [
        (segment_path(SegmentId(PARTITION, UUID(int=number)), start), number, 1)
        for start, number in ((20, 2), (20, 3), (300, 1))
    ]


# --- checking --------------------------------------------------------------------------------------------------


def test_a_stored_segment_is_verified_and_says_what_it_holds() -> None:
    store = PlainStore()
    segment, _ = stored(store, 100, 50, 25)
    facts = verify_segment(store, segment)
    assert (facts.start, facts.end, facts.terms) == (10, 184, ((0, 10), (1, 160)))


@pytest.mark.matrix
def test_every_truncation_and_flipped_byte_is_found() -> None:
    store = PlainStore()
    segment, table = stored(store, 30, 20, value=8)
    path = path_of(segment)
    sound = bytes(store.get(path).data)
    check = CheckTask(segment.start, segment.end + 1, tuple(plan_segment(store, segment, segment.start)))
    assert check().problems == ()
    dice = random.Random(1)
    for at in range(0, len(sound), 3):
        flipped = bytearray(sound)
        flipped[at] ^= 1 << dice.randrange(8)
        for damaged in (sound[:at], bytes(flipped)):
            store.put(path, damaged)
            forget_tails()
            with pytest.raises(CorruptData, match=path):
                verify_segment(store, segment)
            assert path in check().problems[0].message
            try:
                found = fetched(plan_segment(store, segment, 10))
            except CorruptData as error:
                assert path in str(error)  # noqa: PT017 - or the truth, which is as good
            else:  # what is damaged was not read: the offsets, or what Parquet says of its pages
                assert found.equals(table)


def test_bytes_behind_a_segment_are_found() -> None:
    store = PlainStore()
    segment, _ = stored(store, 30)
    store.put(path_of(segment), bytes(store.get(path_of(segment)).data) + b"!")
    with pytest.raises(CorruptData, match="bytes"):
        verify_segment(store, segment)


def test_another_sound_segment_in_its_place_is_found() -> None:
    store = PlainStore()
    segment, _ = stored(store, 30)
    other, _ = stored(store, 30, id=SegmentId(PARTITION, UUID(int=6)))
    store.put(path_of(segment), store.get(path_of(other)).data)
    with pytest.raises(CorruptData):
        verify_segment(store, segment)
    with pytest.raises(CorruptData):
        plan_segment(store, segment, 10)


def test_events_with_other_offsets_than_the_object_are_found() -> None:
    store = PlainStore()
    segment, _ = stored(store, 30)
    for wrong in (replace(segment, end=38), replace(segment, terms=((1, 10),)), replace(segment, max_timestamp=9)):
        with pytest.raises(CorruptData, match="events"):
            verify_segment(store, wrong)
        with pytest.raises(CorruptData, match="events"):
            plan_segment(store, wrong, 10)
    with pytest.raises(CorruptData, match="seal"):
        seal_of(replace(segment, size=7))


def test_a_missing_object_is_not_found_and_not_damaged() -> None:
    store = PlainStore()
    segment, _ = stored(store, 30)
    spans = plan_segment(store, segment, 10)
    store.delete(path_of(segment))
    for look in (
        lambda: verify_segment(store, segment),
        spans[0].fetch,
        lambda: (forget_tails(), spans[0].fetch()),
    ):
        with pytest.raises(NotFound, match="offsets 10 to 39"):
            look()


def test_a_failing_store_is_not_taken_for_damage() -> None:
    store = FaultyStore(PlainStore())
    segment, table = stored(store, 30)
    spans = plan_segment(store, segment, 10)
    for look in (lambda: verify_segment(store, segment), spans[0].fetch):
        store.fail_next("get_range")
        with pytest.raises(TransientStorageError):
            look()
    assert fetched(spans).equals(table)


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "end"), [(10, 4010), (10, 11), (1234, 1235), (1300, 2700), (4009, 4010)])
def test_a_plan_gives_exactly_the_offsets_asked_for(first: int, end: int) -> None:
    store = PlainStore()
    segment, table = stored(store, 1000, 1000, 1000, 1000)
    spans = plan_segment(store, segment, first, Limit(upto=end))
    assert all(isinstance(span, Span) and hasattr(span, "term") for span in spans)
    assert [span.first for span in spans[1:]] == [span.next for span in spans[:-1]]
    assert fetched(spans).equals(table.slice(first - 10, end - first))
    assert all(batch.schema == READ_SCHEMA for span in spans for batch in span.fetch())


def test_spans_have_their_term_and_their_bytes() -> None:
    store = PlainStore()
    segment, _ = stored(store, 1000, 1000, 1000, 1000)
    spans = plan_segment(store, segment, 10)
    assert {span.term for span in spans if span.next <= 2010} == {0}
    assert {span.term for span in spans if span.first >= 2010} == {1}
    assert not [span for span in spans if span.first < 2010 < span.next]
    assert 0.9 * segment.size < sum(span.size for span in spans) < segment.size


def test_a_limit_ends_a_plan_but_never_before_the_first_group() -> None:
    store = PlainStore()
    segment, _ = stored(store, 1000, 1000, 1000, 1000)
    everything = plan_segment(store, segment, 10)
    assert plan_segment(store, segment, 10, Limit(bytes=1)) == everything[:1]
    assert plan_segment(store, segment, 10, Limit(batches=2)) == everything[:2]
    assert plan_segment(store, segment, 4010) == []


@pytest.mark.parametrize("columns", [["value"], ["offset"], ["value", "offset"], ["headers", "op", "key"]])
def test_columns_are_given_in_the_order_asked(columns: list[str]) -> None:
    store = PlainStore()
    segment, table = stored(store, 1000, 1000)
    spans = plan_segment(store, segment, 500)
    assert fetched(spans, columns).equals(table.slice(490).select(columns))
    with pytest.raises(InvalidInput, match="colour"):
        spans[0].fetch(["colour"])


@pytest.mark.matrix
def test_columns_that_are_not_asked_for_are_not_read() -> None:
    store = CountingStore()
    segment, _ = stored(store, 200, value=100_000, expected=16 << 20)
    spans = plan_segment(store, segment, 10)
    store.read = 0
    for span in spans:
        span.fetch(["key", "op"])
    assert store.read < segment.size / 100


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("count", "value"),
    matrix_cases.some([(200_000, 8), (40_000, 100), (6_000, 1024), (800, 20_000), (200, 100_000), (120, 400_000)], 2),
)
def test_a_hundredth_of_the_offsets_costs_at_most_a_tenth_of_the_bytes(count: int, value: int) -> None:
    store = CountingStore()
    segment, _ = stored(store, count // 2, count // 2, value=value, expected=count * (value + 20))
    part = max(1, count // 100)
    for first in (10, 10 + count // 3, 10 + count // 2 - part // 2, 10 + count - part):
        forget_tails()
        store.read = store.requests = 0
        spans = plan_segment(store, segment, first, Limit(upto=first + part))
        assert fetched(spans).num_rows == part
        assert store.read <= segment.size / 10
        assert store.requests == 1 + len(spans)


def test_the_tail_is_read_once_in_a_process() -> None:
    store = CountingStore()
    segment, _ = stored(store, 1000, 1000)
    plan_segment(store, segment, 10)
    for span in plan_segment(store, segment, 10):
        span.fetch()
    assert store.requests == 1 + len(plan_segment(store, segment, 10))


def test_only_the_tails_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    segments = [stored(store, 10, id=SegmentId(PARTITION, UUID(int=n)))[0] for n in range(1, 5)]
    monkeypatch.setattr(segment_files, "_KEPT_TAILS", 3 * max(seal_of(segment).tail for segment in segments))
    for segment in segments[:3]:
        load_tail(store, segment)
    load_tail(store, segments[0])
    load_tail(store, segments[3])  # the second has to go
    store.requests = 0
    load_tail(store, segments[0])
    load_tail(store, segments[3])
    assert store.requests == 0
    load_tail(store, segments[1])
    assert store.requests == 1


def test_a_span_is_fetched_alike_by_threads_and_from_its_pickle(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    segment, table = stored(store, 1000, 1000)
    spans = plan_segment(store, segment, 10)
    forget_tails()
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda _: fetched(spans), range(8)))
    copies = pickle.loads(pickle.dumps(spans))
    assert all(found.equals(table) for found in [*tables, fetched(copies)])


def test_a_store_in_memory_cannot_be_pickled_in_a_span() -> None:
    segment, _ = stored(store := PlainStore(), 10)
    with pytest.raises(InvalidInput, match="memory"):
        pickle.dumps(plan_segment(store, segment, 10))


def test_seeking_by_time_finds_the_first_batch_listed_then_or_later() -> None:
    store = PlainStore()
    counts = [700, 5, 1200, 1, 1, 900]
    segment, _ = stored(store, *counts)
    firsts = [10 + sum(counts[:number]) for number in range(len(counts))]
    assert [listed_since(store, segment, 1000 * number) for number in range(6)] == firsts
    assert [listed_since(store, segment, 1000 * number - 1) for number in range(6)] == firsts
    assert [listed_since(store, segment, 1000 * number + 1) for number in range(6)] == [*firsts[1:], None]


def test_a_segment_is_put_as_its_buffers_are() -> None:
    class Remembering(PlainStore):
        given: Payload = b""

        def put(self, path: str, data: Payload) -> None:
            self.given = data
            super().put(path, data)

    stored(store := Remembering(), 30)
    assert not isinstance(store.given, bytes)
