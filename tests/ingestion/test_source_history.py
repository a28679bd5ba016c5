"""An ingest continues only with the history that it began with: proven by term and fingerprint, not by records."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged, NotReady
from strandline.formats.segment.file import SegmentTail
from strandline.log.memory import MemoryLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.log.writers.source import advancing, source_writer
from strandline.model.head import Head, SourceProof
from strandline.model.records import Op
from strandline.tier.copy.segment_files import forget_tails
from tests.ingestion.sources import a_log, append, changes, content, position
from tests.ingestion.test_outages import eventually
from tests.tier.read.tiered_logs import Tiers, forget, value_at
from tests.tier.test_compaction import DAY, keyed

HISTORY = "^The source has another history than the one that .* holds of it"
INGESTS = {"serial": sl.ingest, "parallel": sl.bulk.ingest}


def opened(kind: str, folder: Path) -> Any:
    return sl.open(f"wal://{folder}" if kind == "wal" else folder, create=True)


def proof_in(target: Any, source: Any) -> SourceProof | None:
    return target.last_append(source_writer(str(source.log_id))).proof


def with_another_middle(kind: str, folder: Path, *, origin: Any, copy: Any) -> Any:
    """The middle of a chain, restored after its end was ingested into ``copy``; its last record is the same."""
    place, backup = folder / "middle", folder / "backup"
    with opened(kind, place) as middle:
        append(origin, changes(2), number=0)
        sl.ingest(origin, middle)
    shutil.copytree(place, backup)
    with opened(kind, place) as middle:
        append(middle, changes(1, 50), writer=8)
        append(origin, changes(1, 2), number=1)
        sl.ingest(origin, middle)
        sl.ingest(middle, copy)
    shutil.rmtree(place)
    shutil.copytree(backup, place)
    restored = opened(kind, place)
    append(restored, changes(1, 70), writer=9)
    sl.ingest(origin, restored)
    append(origin, changes(1, 3), number=2)
    sl.ingest(origin, restored)
    assert content(restored, 3).slice(0, 1).equals(content(copy, 3)), "the last ingested record is the same"
    return restored


@pytest.mark.parametrize("run", INGESTS)
@pytest.mark.parametrize("kind", ["object", "wal"])
def test_a_restored_log_with_the_same_last_record_is_another_history(tmp_path, kind, run):
    copy = sl.open(tmp_path / "copy", create=True)
    with with_another_middle(kind, tmp_path, origin=MemoryLog(), copy=copy) as middle:
        with pytest.raises(Diverged, match=HISTORY):
            INGESTS[run](middle, sl.open(tmp_path / "copy"))  # as stored: an open log has its head in memory
        assert copy.bounds().next == 4


@pytest.mark.parametrize(
    "kind", ["wal", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("memory", "node", "remote"))]
)
def test_every_kind_of_target_stores_the_proof(tmp_path, kind):
    with a_log(kind, tmp_path / "copy") as copy:
        middle = with_another_middle("object", tmp_path, origin=MemoryLog(), copy=copy)
        with pytest.raises(Diverged, match=HISTORY):
            sl.ingest(middle, copy)


def test_a_source_promoted_by_force_is_another_history(tmp_path):
    place, copy = tmp_path / "wal", MemoryLog()
    with WalLog.open(place) as source:
        source.append_batch(changes(4), term=1).result()
        source.append_batch(changes(1, 4), term=1, timestamp=1000).result()
        sl.ingest(source, copy)
    rewind(str(place), 4, quarantine=str(tmp_path / "aside"))
    with WalLog.open(place) as source:
        source.append_batch(changes(1, 4), term=2, timestamp=1000).result()
        with pytest.raises(Diverged, match=HISTORY):
            sl.ingest(source, copy)


@pytest.mark.parametrize("run", INGESTS)
def test_the_erasure_of_the_last_ingested_record_is_no_other_history(tmp_path, run):
    forget_tails()
    tiers, copy = Tiers("object"), sl.open(tmp_path / "copy", create=True)
    keyed(tiers, [(Op.PUT, b"bert", b"stays"), (Op.PUT, b"anna", b"secret")])
    INGESTS[run](tiers.tiered(), copy)
    keyed(tiers, [(Op.PURGE, b"anna", None)])
    tiers.tierer(target=1).run_once(everything=True)
    tiers.trim()
    assert tiers.tierer(target=1, grace=DAY).compact(purge=True, everything=True).erased == 1
    tiers.reopen()
    assert INGESTS[run](tiers.tiered(), copy).records == 1
    forget_tails()


def unproven(source: Any, target: Any, upto: int) -> None:
    """Ingest as an older version did."""
    writer = source_writer(str(source.log_id))
    target.append(content(source).slice(0, upto), writer=advancing(writer, upto), number=0).result()
    assert proof_in(target, source) is None


def test_a_position_of_an_older_version_is_compared_by_its_record_until_the_next_append_proves_it(tmp_path):
    source, copy, other = sl.open(tmp_path / "source", create=True), MemoryLog(), MemoryLog()
    append(source, changes(5))
    unproven(source, copy, 5)
    other._head = Head(source.log_id)
    append(other, changes(5, 30))
    with pytest.raises(Diverged, match=r"^The last record that .* is not the one at offset 4"):
        sl.ingest(other, copy)
    append(source, changes(1, 5), number=1)
    assert sl.ingest(source, copy).records == 1
    assert proof_in(copy, source) == SourceProof.at(source.end())


def test_a_position_of_an_older_version_whose_record_was_erased_is_continued():
    forget_tails()
    tiers, copy = Tiers("object"), MemoryLog()
    keyed(tiers, [(Op.PUT, b"anna", b"secret")])
    unproven(tiers.tiered(), copy, 1)
    keyed(tiers, [(Op.PURGE, b"anna", None)])
    tiers.tierer(target=1).run_once(everything=True)
    tiers.trim()
    tiers.tierer(target=1, grace=DAY).compact(purge=True, everything=True)
    tiers.reopen()
    assert sl.ingest(tiers.tiered(), copy).records == 1
    forget_tails()


@pytest.mark.parametrize("kind", ["object", "wal"])
def test_records_of_a_cold_tier_are_proven_by_their_own_batch(kind):
    forget_tails()
    tiers, copy = Tiers(kind), MemoryLog()
    keyed(tiers, [(Op.PUT, b"anna", b"1"), (Op.PUT, b"bert", b"2")])
    keyed(tiers, [(Op.PUT, b"carl", b"3")])
    tiers.tierer(target=1).run_once(everything=True)
    tiers.trim()
    keyed(tiers, [(Op.PUT, b"dora", b"4")])
    source = tiers.tiered()

    def stop_after_the_first(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.ingest(source, copy, batching=sl.followers.Batching(records=1), on_progress=stop_after_the_first)
    assert position(source, copy) < 4
    assert proof_in(copy, source) == SourceProof.at(source.cursor_at(position(source, copy)))
    assert proof_in(copy, source) is not None
    sl.ingest(source, copy)
    assert content(copy).equals(content(source))
    forget_tails()


@pytest.mark.parametrize("place", ["inside a segment", "at its end", "before the hot tier"])
@pytest.mark.parametrize("run", INGESTS)
@pytest.mark.parametrize("kind", ["object", "wal"])
def test_another_history_is_found_after_its_records_moved_to_the_cold_tier(tmp_path, kind, run, place):
    forget_tails()
    tiers, copy = Tiers(kind), sl.open(tmp_path / "copy", create=True)
    tiers.append(1)
    backup = tiers.backup()
    tiers.append(1)
    INGESTS[run](tiers.tiered(), copy)
    tiers.restore(backup)
    tiers.append(1, like=0)
    tiers.append(1)
    tiers.tier(target=10_000 if place == "inside a segment" else 1)
    if place == "before the hot tier":
        forget(tiers.hot(), 2)
    else:
        assert tiers.trim() == len(tiers.truth)
    assert tiers.tiered().read(1, upto=2).__next__().column("value")[0].as_py() == value_at(1), "the same record"
    with pytest.raises(Diverged, match=HISTORY):
        INGESTS[run](tiers.tiered(), copy)
    forget_tails()


@pytest.mark.parametrize("knows_batches", [True, False])
def test_an_ingest_that_follows_into_the_cold_tier_stores_proofs(monkeypatch, knows_batches):
    forget_tails()
    if not knows_batches:  # as in segments that an older version has made
        monkeypatch.setattr(SegmentTail, "fingerprint_at", lambda *_: None)
    tiers, copy, stop = Tiers("object"), MemoryLog(), Event()
    tiers.append(2)
    source = tiers.tiered()

    def grow(progress: Any) -> None:
        if progress.next == 2:  # the end, as it was when the ingest began, proves none of these
            for _ in range(3):
                tiers.append(1)
            tiers.tier(target=10_000)
            assert tiers.trim() == 5
            tiers.append(1)
        else:
            stop.set()

    sl.ingest(source, copy, follow=True, stop=stop, batching=sl.followers.Batching(records=1), on_progress=grow)
    proof = proof_in(copy, source)
    assert proof is not None
    assert proof == SourceProof.at(source.cursor_at(position(source, copy)) if knows_batches else source.end())
    forget_tails()


@pytest.mark.parametrize("index", [True, False])
def test_a_write_ahead_log_knows_the_proof_after_it_was_opened_again(tmp_path, index):
    source, place = sl.open(tmp_path / "source", create=True), tmp_path / "wal"
    append(source, changes(5))
    with WalLog.open(place) as copy:
        sl.ingest(source, copy)
        for number in range(300 if index else 0):  # more frames than one entry of the index covers
            append(copy, changes(1), writer=8, number=number)
    with WalLog.open(place) as copy:
        assert proof_in(copy, source) == SourceProof.at(source.end())


def test_a_write_ahead_log_knows_the_proof_after_its_files_were_rolled_and_trimmed(tmp_path):
    source, place = sl.open(tmp_path / "source", create=True), tmp_path / "wal"
    append(source, changes(5))
    with WalLog.open(place, roll_bytes=4096) as copy:
        sl.ingest(source, copy)
        for number in range(3):
            append(copy, changes(100), writer=8, number=number)
        copy.trim(copy.bounds().next)
    with WalLog.open(place) as copy:
        assert proof_in(copy, source) == SourceProof.at(source.end())


def test_a_proof_of_an_earlier_append_is_not_that_of_a_later_one_without(tmp_path):
    source = sl.open(tmp_path / "source", create=True)
    append(source, changes(5))
    with WalLog.open(tmp_path / "wal") as copy:
        sl.ingest(source, copy)
        writer = source_writer(str(source.log_id))
        copy.append(changes(1, 5), writer=advancing(writer, 1), number=5).result()
        assert proof_in(copy, source) is None
    with WalLog.open(tmp_path / "wal") as copy:
        assert proof_in(copy, source) is None


def holds(replica: Any, count: int) -> bool:
    try:
        return bool(replica.bounds().next == count)
    except NotReady:
        return False


def test_a_replica_stores_the_proof_too(tmp_path):
    source = sl.open(tmp_path / "source", create=True)
    append(source, changes(5))
    shared = {"lease": f"file://{tmp_path}/lease", "policy": "local"}
    with sl.node.Primary.open(tmp_path / "a", name="a", **shared) as primary:
        append(primary, changes(1), writer=8)
        with sl.node.Replica.open(tmp_path / "b", name="b", nodes={"a": primary.url}, **shared) as replica:
            eventually(lambda: holds(replica, 1))
            sl.ingest(source, primary)
            eventually(lambda: holds(replica, 6))
    with WalLog.open(tmp_path / "b" / "data-00000001") as copy:
        assert proof_in(copy, source) == SourceProof.at(source.end())


@pytest.mark.parametrize("kind", ["object", "wal"])
def test_a_cursor_is_not_translated_between_a_copy_and_a_source_of_another_history(tmp_path, kind):
    copy = MemoryLog()
    with with_another_middle(kind, tmp_path, origin=MemoryLog(), copy=copy) as middle:
        for cursor in (copy.cursor_at(4), copy.cursor_at(3), middle.cursor_at(3)):
            with pytest.raises(Diverged, match=HISTORY):
                sl.bulk.translate_cursor(cursor, source=middle, target=copy)


def test_a_replica_that_lags_while_its_primary_is_away_is_no_other_history(tmp_path):
    shared, copy = {"lease": f"file://{tmp_path}/lease", "policy": "local"}, MemoryLog()
    with sl.node.Primary.open(tmp_path / "a", name="a", **shared) as primary:
        append(primary, changes(1), writer=8)
        with sl.node.Replica.open(tmp_path / "b", name="b", nodes={"a": primary.url}, **shared) as replica:
            eventually(lambda: holds(replica, 1))
        append(primary, changes(2, 1), writer=8, number=1)
        sl.ingest(primary, copy)
    with (
        sl.node.Replica.open(tmp_path / "b", name="b", nodes={"a": primary.url}, **shared) as replica,
        sl.node.RemoteLog(f"{replica.url},{primary.url.split('//')[1]}", failover_timeout=0.1) as source,
    ):
        assert source.bounds().next == 1
        with pytest.raises(NotReady, match="does not lead, and no primary could confirm"):
            sl.ingest(source, copy)


def test_only_the_primary_of_several_nodes_decides_that_records_are_deleted_and_skipped(tmp_path):
    shared, early, late = {"lease": f"file://{tmp_path}/lease", "policy": "local"}, MemoryLog(), MemoryLog()
    with sl.node.Primary.open(tmp_path / "a", name="a", **shared) as primary:
        append(primary, changes(2), writer=8)
        for copy in (early, late):
            sl.ingest(primary, copy)
        append(primary, changes(2, 2), writer=8, number=1)
        append(primary, changes(1, 4), writer=8, number=2)
        assert primary.trim(4) == 4
        with (
            sl.node.Replica.open(tmp_path / "b", name="b", nodes={"a": primary.url}, **shared) as replica,
            sl.node.RemoteLog(
                f"{replica.url},{primary.url.split('//')[1]}", failover_timeout=0.1, read_from="replicas"
            ) as source,
        ):
            eventually(lambda: holds(replica, 5))
            with pytest.raises(CursorExpired, match="begins at offset 4"):
                sl.ingest(source, early)
            assert sl.ingest(source, early, skip_trimmed=True).records == 1
            assert content(early).equals(pa.Table.from_batches([changes(2), changes(1, 4)]).combine_chunks())
            assert proof_in(early, source) == SourceProof.at(source.cursor_at(5))
            primary.close()
            with pytest.raises(NotReady):
                sl.ingest(source, late, skip_trimmed=True)
            assert late.bounds().next == 2
