"""Tables that no cache can have given are refused, and never believed or answered with a crash."""

from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import CorruptData
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata.cache import SegmentCache
from tests.matrix_cases import examples

A, B, C = (TopicPartition(name, UUID(int=number), 0) for number, name in enumerate("abc"))


def sample():
    """Three segments of a partition, the second with two terms; one of another; a removed one; a deleted partition."""
    cache = SegmentCache()
    for at, (partition, number, terms) in enumerate(
        [(A, 1, ((0, 0),)), (A, 2, ((0, 100), (1, 150))), (A, 3, ((1, 200),)), (B, 4, ((0, 300),)), (B, 5, ((0, 400),))]
    ):
        segment = SegmentId(partition, UUID(int=number << 64 | number))
        cache.apply(
            SegmentMetadata(
                segment=segment,
                start=at * 100,
                end=at * 100 + 99,
                broker=1,
                max_timestamp=1,
                event_timestamp=1,
                terms=terms,
                size=10,
            )
        )
        for state in [SegmentState.COPY_FINISHED] if number < 5 else list(SegmentState)[1:]:
            cache.apply(SegmentUpdate(segment=segment, broker=1, event_timestamp=1, state=state, custom_metadata=b"m"))
    for state in PartitionDeleteState:
        cache.apply(PartitionDelete(partition=C, broker=1, event_timestamp=1, state=state))
    return cache.to_tables()


def changed(tables, table, column, values):
    old = tables[table]
    at = old.schema.get_field_index(column)
    return {**tables, table: old.set_column(at, old.schema.field(at), pa.array(values, old.schema.field(at).type))}


def test_the_sample_itself_is_fine():
    cache = SegmentCache.from_tables(sample())
    assert cache.segment_for(A, 1, 170).segment.id.int & 0xFF == 2
    assert all(list(cache.segments(partition)) for partition in (A, B))


def test_slices_in_many_chunks_are_fine():
    tables = {
        name: pa.concat_tables([table.slice(at, 1) for at in range(table.num_rows)]) for name, table in sample().items()
    }
    assert SegmentCache.from_tables(tables).to_tables() == sample()


def test_empty_tables_are_an_empty_cache():
    tables = SegmentCache().to_tables()
    assert SegmentCache.from_tables(tables).to_tables() == tables


WRONG = {
    "partition not there": ("segments", "partition", [0, 0, 0, 3]),
    "partition below 0": ("segments", "partition", [-1, 0, 0, 1]),
    "segment of a deleted partition": ("segments", "partition", [0, 0, 0, 2]),
    "partitions out of order": ("segments", "partition", [1, 0, 0, 1]),
    "starts out of order": ("segments", "start", [150, 100, 200, 300]),
    "start below 0": ("segments", "start", [-1, 100, 200, 300]),
    "end before start": ("segments", "end", [99, 99, 299, 399]),
    "size below 0": ("segments", "size", [10, -1, 10, 10]),
    "state of a removed segment": ("segments", "state", [1, 1, 1, 3]),
    "unknown state": ("segments", "state", [1, 1, 1, 9]),
    "state below 0": ("segments", "state", [1, 1, 1, -1]),
    "a null": ("segments", "broker", [1, None, 1, 1]),
    "a null list": ("segments", "terms", [[0], None, [1], [0]]),
    "no terms": ("segments", "terms", [[0], [], [1], [0]]),
    "fewer terms than starts": ("segments", "terms", [[0], [0], [1], [0]]),
    "as many, in other rows": ("segments", "terms", [[0, 1], [0], [1], [0]]),
    "a null term": ("segments", "terms", [[0], [0, None], [1], [0]]),
    "a term below 0": ("segments", "terms", [[-1], [0, 1], [1], [0]]),
    "terms out of order": ("segments", "terms", [[0], [1, 0], [1], [0]]),
    "a term twice": ("segments", "terms", [[0], [1, 1], [1], [0]]),
    "term starts out of order": ("segments", "term_starts", [[0], [150, 100], [200], [300]]),
    "a term start below 0": ("segments", "term_starts", [[-1], [100, 150], [200], [300]]),
    "answers before it is copied": ("segments", "state", [0, 1, 1, 1]),
    "answers for nothing": ("segments", "term_starts", [[0], [100, 100], [200], [300]]),
    "ids that are not there": ("segments", "by_id", [0, 1, 2, 4]),
    "ids below 0": ("segments", "by_id", [-1, 1, 2, 3]),
    "ids out of order": ("segments", "by_id", [1, 0, 2, 3]),
    "ids twice": ("segments", "by_id", [0, 1, 2, 2]),
    "the same segment twice": ("segments", "id", [UUID(int=n << 64 | n).bytes for n in (1, 1, 3, 4)]),
    "a removed segment that is there": ("removed", "id", [UUID(int=4 << 64 | 4).bytes]),
    "a removed segment of nowhere": ("removed", "partition", [3]),
    "a highest offset of nowhere": ("highest", "partition", [0, 0, 3]),
    "a highest offset of a deleted partition": ("highest", "partition", [0, 0, 2]),
    "highest offsets out of order": ("highest", "term", [1, 0, 0]),
    "a highest offset twice": ("highest", "term", [0, 0, 0]),
    "a highest offset too low": ("highest", "offset", [148, 299, 499]),
    "a highest offset below 0": ("highest", "offset", [149, 299, -1]),
    "a highest offset missing": ("highest", "term", [0, 2, 0]),
    "a partition twice": ("partitions", "topic_id", [A.topic_id.bytes, A.topic_id.bytes, C.topic_id.bytes]),
    "a partition below 0": ("partitions", "partition", [-1, 0, 0]),
    "an unknown deletion": ("partitions", "deletion_state", [None, None, 3]),
    "half of a deletion": ("partitions", "deletion_broker", [None, None, None]),
    "half of another": ("partitions", "deletion_broker", [1, None, 1]),
    "a partition without a name": ("partitions", "name", ["a", None, "c"]),
    "a name that is too long": ("partitions", "name", ["a", "b" * 40_000, "c"]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_impossible_values_are_refused(wrong):
    table, column, values = wrong
    with pytest.raises(CorruptData, match=r"[Rr]eplay the events"):
        SegmentCache.from_tables(changed(sample(), table, column, values))


def test_two_that_answer_from_the_same_offset_of_a_term_are_refused():
    tables = changed(sample(), "segments", "start", [100, 100, 200, 300])
    tables = changed(tables, "segments", "end", [199, 199, 299, 399])
    tables = changed(tables, "highest", "offset", [199, 299, 499])
    with pytest.raises(CorruptData, match="two segments answer"):
        SegmentCache.from_tables(tables)


@pytest.mark.parametrize("name", ["partitions", "segments", "highest", "removed"])
def test_a_missing_table_or_column_or_another_type_is_refused(name):
    tables = sample()
    with pytest.raises(CorruptData, match=f"no table of {name}"):
        SegmentCache.from_tables({key: table for key, table in tables.items() if key != name})
    with pytest.raises(CorruptData, match="has the columns"):
        SegmentCache.from_tables({**tables, name: tables[name].drop_columns(["partition"])})
    text = tables[name].set_column(
        tables[name].schema.get_field_index("partition"), "partition", pa.array(["x"] * tables[name].num_rows)
    )
    with pytest.raises(CorruptData):
        SegmentCache.from_tables({**tables, name: text})


def test_two_ids_with_the_same_lower_half_are_two_segments():
    tables = changed(sample(), "segments", "id", [UUID(int=n << 64 | 7).bytes for n in (1, 2, 3, 4)])
    cache = SegmentCache.from_tables(tables)
    for partition, number in ((A, 1), (A, 2), (A, 3), (B, 4)):
        assert cache.get(SegmentId(partition, UUID(int=number << 64 | 7))).start == (number - 1) * 100
    with pytest.raises(CorruptData, match="leaves rows out"):
        SegmentCache.from_tables(changed(tables, "segments", "by_id", [0, 1, 1, 3]))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_whatever_numbers_tables_have_they_are_a_cache_or_refused(data):
    tables = sample()
    name = data.draw(st.sampled_from(["partitions", "segments", "highest", "removed"]))
    field = data.draw(st.sampled_from([f for f in tables[name].schema if pa.types.is_integer(f.type)]))
    rows = tables[name].num_rows
    bound = 1 << field.type.bit_width - 1
    number = st.one_of(st.integers(-2, 5), st.integers(-bound, bound - 1), st.sampled_from([-bound, bound - 1]))
    values = data.draw(st.lists(number, min_size=rows, max_size=rows))
    try:
        cache = SegmentCache.from_tables(changed(tables, name, field.name, values))
    except CorruptData:
        return
    for partition in (A, B):
        for segment in cache.segments(partition):
            assert pc.is_in(
                pa.scalar(segment.segment.id.bytes, pa.binary(16)), tables["segments"]["id"].combine_chunks()
            )
            cache.segment_for(partition, segment.terms[0][0], segment.start)
    SegmentCache.from_tables(cache.to_tables())
