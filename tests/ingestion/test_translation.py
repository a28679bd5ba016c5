"""Cursors of a source and of its ingested copy, translated into each other."""

from __future__ import annotations

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged, NotReady
from strandline.log.memory import MemoryLog
from strandline.model.head import Head
from strandline.testing.sinks import MemorySink
from strandline.tier.copy.segment_files import forget_tails
from tests.ingestion.sources import a_log, append, changes, content, fill
from tests.tier.read.tiered_logs import Tiers

KINDS = [
    pytest.param("object", "wal"),
    *(
        pytest.param(source, target, marks=pytest.mark.matrix)
        for source, target in [("wal", "object"), ("object", "remote"), ("node", "object"), ("memory", "memory")]
    ),
]


def interleaved(source, target, rounds=6):
    """Ingest piece by piece, while other writers append to the target."""
    for number in range(rounds):
        append(target, changes(1 + number, 9000 + number), writer=9, number=number)
        append(source, changes(10, number * 10), number=number)
        sl.ingest(source, target)


@pytest.mark.parametrize(("source_kind", "target_kind"), KINDS)
def test_a_cursor_of_the_source_is_that_of_the_same_record_in_the_copy_and_back(tmp_path, source_kind, target_kind):
    with a_log(source_kind, tmp_path / "source") as source, a_log(target_kind, tmp_path / "target") as target:
        interleaved(source, target)
        for offset in range(61):
            there = sl.bulk.translate_cursor(source.cursor_at(offset), source=source, target=target)
            assert there.log_id == target.log_id
            assert sl.bulk.translate_cursor(there, source=source, target=target).next == offset
            if offset < 60:
                (record,) = (batch.slice(0, 1) for batch in list(target.read(there))[:1])
                assert record.column("timestamp")[0].value == 1_700_000_000_000_000 + offset


@pytest.mark.parametrize(("source_kind", "target_kind"), KINDS)
def test_a_follower_moved_to_the_copy_and_back_applies_each_record_once(tmp_path, source_kind, target_kind):
    with a_log(source_kind, tmp_path / "source") as source, a_log(target_kind, tmp_path / "target") as target:
        fill(source)
        sl.ingest(source, target)
        first = MemorySink()
        here = sl.follow(source, first, upto=37)
        there = sl.bulk.translate_cursor(here, source=source, target=target)
        second = MemorySink()
        there = sl.follow(target, second, start=there, upto=there.next + 40)
        back = sl.bulk.translate_cursor(there, source=source, target=target)
        third = MemorySink()
        assert sl.follow(source, third, start=back, upto="end").next == 100
        rows = [row for sink in (first, second, third) for row in applied(sink)]
        assert rows == content(source).to_pylist()


def applied(sink):
    table = pa.concat_tables(sink.records)
    return table.drop_columns("offset").to_pylist()


def test_a_position_that_the_copy_has_not_reached_is_not_ready():
    source, target = MemoryLog(), MemoryLog()
    fill(source, batches=1)
    with pytest.raises(NotReady, match="ingest it first"):
        sl.bulk.translate_cursor(source.cursor_at(5), source=source, target=target)
    sl.ingest(source, target)
    append(source, changes(5), number=1)
    with pytest.raises(NotReady, match="holds the source up to position 25, and not up to 27"):
        sl.bulk.translate_cursor(source.cursor_at(27), source=source, target=target)


def test_a_position_that_the_copy_deleted_is_expired():
    source, target = MemoryLog(), MemoryLog()
    interleaved(source, target)
    kept = sl.bulk.translate_cursor(source.cursor_at(30), source=source, target=target)
    target.trim(kept.next)
    assert sl.bulk.translate_cursor(source.cursor_at(30), source=source, target=target) == kept
    with pytest.raises(CursorExpired, match="does not hold position 29"):
        sl.bulk.translate_cursor(source.cursor_at(29), source=source, target=target)


def test_a_position_that_the_source_deleted_is_found_in_the_copy():
    source, target = MemoryLog(), MemoryLog()
    interleaved(source, target)
    here = source.cursor_at(25)
    before = sl.bulk.translate_cursor(here, source=source, target=target)
    source.trim(60)
    assert sl.bulk.translate_cursor(here, source=source, target=target) == before


def test_a_cursor_of_another_log_or_of_another_history_is_refused():
    source, target = MemoryLog(), MemoryLog()
    interleaved(source, target)
    with pytest.raises(Diverged, match="a cursor of neither"):
        sl.bulk.translate_cursor(MemoryLog().cursor_at(0), source=source, target=target)
    restored = MemoryLog()
    restored._head = Head(source.log_id)
    for number in range(6):
        append(restored, changes(10, number), writer=3, number=number)
    with pytest.raises(Diverged):
        sl.bulk.translate_cursor(restored.cursor_at(20), source=source, target=target)


def test_offsets_that_were_skipped_belong_to_no_record_of_the_copy():
    source, target = MemoryLog(), MemoryLog()
    fill(source, batches=2)
    sl.ingest(source, target)
    for number in (2, 3):
        append(source, changes(25, number * 25), number=number)
    source.trim(75)
    sl.ingest(source, target, skip_trimmed=True)
    for offset, there in ((50, 50), (75, 50), (76, 51), (100, 75)):
        assert sl.bulk.translate_cursor(source.cursor_at(offset), source=source, target=target).next == there
    assert sl.bulk.translate_cursor(target.cursor_at(51), source=source, target=target).next == 76


def test_a_copy_with_a_cold_tier_translates_what_its_hot_tier_holds():
    forget_tails()
    source, tiers = MemoryLog(), Tiers("object")
    fill(source, batches=1, count=5)
    sl.ingest(source, tiers.tiered())
    tiers.append(5)
    tiers.tier()
    assert tiers.trim() == 10
    append(source, changes(5, 5), number=1)
    target = tiers.tiered()
    sl.ingest(source, target)
    for offset in range(5, 11):
        assert sl.bulk.translate_cursor(source.cursor_at(offset), source=source, target=target).next == 5 + offset
    with pytest.raises(
        CursorExpired, match="does not hold position 4"
    ):  # batches of segments do not name their writers
        sl.bulk.translate_cursor(source.cursor_at(4), source=source, target=target)
    forget_tails()
