"""Staged appends: many processes store batches, one lists them, all or nothing and once, across crashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.bulk.verifying import verify as verify_log
from strandline.errors import ExpectationFailed, InvalidInput, NotFound, OutOfOrder, StrandlineError
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head.edits import BatchListing
from strandline.log.object.staging import FOLDER, KEPT_SECONDS, MOST_BATCHES, StagedAppend
from strandline.log.writers.source import source_writer
from strandline.model.head import Receipt, WriterId
from strandline.model.records import record_batch
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore, OperationName
from strandline.testing.plain import PlainStore

STREAM = source_writer("a stream")
JOB = WriterId(UUID(int=77))
_WRITES: tuple[OperationName, ...] = ("put", "put_if")


def rows(*values: bytes) -> pa.RecordBatch:
    count = len(values)
    return record_batch(timestamps=[7] * count, ops=[0] * count, keys=[None] * count, values=values)


def stored(log: ObjectLog) -> list[bytes]:
    return [value for batch in log.read(0) for value in batch.column("value").to_pylist()]


class Place:
    """A log in a store, and the processes that append to it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FaultyStore(PlainStore(clock=self.clock))
        self.chance = SeededChance(3)
        self.appends = 0
        self.log = open_log(self.store, create=True, env=Env(clock=self.clock, chance=self.chance))

    def append(self, writer: WriterId = STREAM, job: str = "job") -> StagedAppend:
        self.appends += 1
        return StagedAppend(
            self.store,
            self.log.log_id,
            writer,
            job,
            env=Env(clock=self.clock, chance=SeededChance(1000 + self.appends)),
        )

    def put(self, *values: bytes, upto: int = 1, writer: WriterId = STREAM, job: str = "job") -> Receipt:
        append = self.append(writer, job)
        return append.commit([batch for value in values for batch in append.write([rows(value)])], upto=upto)

    def check(self) -> None:
        assert verify_log(self.log).findings == []


@pytest.fixture
def place() -> Place:
    return Place()


def test_all_batches_are_listed_in_the_given_order_and_their_objects_are_of_the_log(place: Place) -> None:
    append = place.append()
    second, first = append.write([rows(b"c"), rows(b"d")]), append.write([rows(b"a", b"b")])
    assert stored(place.log) == []
    assert append.commit([*first, *second], upto=1) == Receipt(0, 4)
    assert stored(place.log) == [b"a", b"b", b"c", b"d"]
    append.discard([*first, *second])
    assert not list(place.store.list(FOLDER))
    assert stored(place.log) == [b"a", b"b", b"c", b"d"]
    place.check()


@pytest.mark.parametrize("writer", [STREAM, JOB])
def test_a_repeated_commit_changes_nothing_whoever_makes_it_and_with_whatever_rows(
    place: Place, writer: WriterId
) -> None:
    assert place.put(b"a", b"b", writer=writer) == Receipt(0, 2)
    assert place.put(b"other", b"rows", b"and more", writer=writer, job="again") == Receipt(0, 2)
    assert stored(place.log) == [b"a", b"b"]
    place.check()


def test_the_commits_of_a_stream_follow_each_other_also_over_empty_ones(place: Place) -> None:
    place.put(b"a", upto=1)
    assert place.put(upto=2) == Receipt(None, 0)  # no rows: nothing to remember
    assert place.put(b"b", upto=3) == Receipt(1, 1)
    assert place.put(b"late", upto=2) == Receipt(None, 0)  # the log is behind it already
    assert stored(place.log) == [b"a", b"b"]
    place.check()


def test_a_commit_from_another_position_than_the_logs_is_refused(place: Place) -> None:
    append = place.append()
    append.commit(append.write([rows(b"a")]), since=0, upto=10)
    batches = append.write([rows(b"b")])
    with pytest.raises(OutOfOrder, match="up to position 10, and the append begins at 5"):
        append.commit(batches, since=5, upto=20)
    append.commit(batches, since=10, upto=20)
    assert stored(place.log) == [b"a", b"b"]


def test_a_conditional_commit_is_listed_only_at_the_expected_end(place: Place) -> None:
    append = place.append(JOB)
    place.put(b"a")
    batches = append.write([rows(b"b")])
    with pytest.raises(ExpectationFailed, match="expected the log to end at 5, and it ends at 1"):
        append.commit(batches, expect=5)
    assert append.commit(batches, expect=1) == Receipt(1, 1)
    assert append.commit(batches, expect=1) == Receipt(1, 1)  # repeated, though the end is another one now


def test_a_source_continues_with_plain_appends_after_a_group_and_the_reverse(place: Place) -> None:
    from strandline.ingestion.api import ingest
    from strandline.log.memory import MemoryLog

    source = MemoryLog()
    writer = source_writer(str(source.log_id))
    source.append(rows(b"a"), writer=WriterId(UUID(int=1)), number=0).result()
    ingest(source, place.log)
    source.append(rows(b"b"), writer=WriterId(UUID(int=1)), number=1).result()
    append = place.append(writer)
    append.commit(append.write([rows(b"b")]), since=1, upto=2)
    source.append(rows(b"c"), writer=WriterId(UUID(int=1)), number=2).result()
    ingest(source, place.log)
    assert stored(place.log) == [b"a", b"b", b"c"]
    place.check()


def test_trims_between_writing_and_committing_take_nothing(place: Place) -> None:
    append = place.append()
    batches = append.write([rows(b"a")])
    for _ in range(5):
        place.clock.advance(3600)
        place.log.trim(grace=0)
    append.commit(batches, upto=1)
    for _ in range(3):
        place.log.trim(grace=0)
    assert stored(place.log) == [b"a"]
    place.check()


def test_trims_between_the_copies_and_the_listing_make_it_copy_again(place: Place) -> None:
    append = place.append()
    batches = append.write([rows(b"a")])
    rounds = []

    def trim(call: Call) -> None:
        if call.name == "put_if" and call.path == "head" and call.stage == "before" and len(rounds) < 2:
            rounds.append(call)
            place.store.unhook()
            place.log.trim(grace=0)
            place.log.trim(grace=0)  # now the copies can no longer be listed, and are gone
            place.store.hook(trim)

    place.store.hook(trim)
    append.commit(batches, upto=1)
    place.store.unhook()
    assert len(rounds) == 2
    assert stored(place.log) == [b"a"]
    place.log.trim(grace=0)
    place.log.trim(grace=0)
    assert stored(place.log) == [b"a"]
    place.check()


def test_a_trim_deletes_what_a_dead_job_staged_a_day_later_and_not_what_a_living_one_did(place: Place) -> None:
    place.append(job="dead").write([rows(b"x")])
    living = place.append(job="living")
    old = living.write([rows(b"a")])
    place.clock.advance(KEPT_SECONDS - 60)
    place.log.trim(grace=0)
    new = living.write([rows(b"b")])
    place.clock.advance(120)
    place.log.trim(grace=0)
    assert {item.path.split("/")[1] for item in place.store.list(FOLDER)} == {"living"}
    living.commit([*old, *new], upto=1)
    assert stored(place.log) == [b"a", b"b"]


def test_a_job_whose_staged_batches_are_gone_appends_nothing_and_raises(place: Place) -> None:
    append = place.append()
    batches = append.write([rows(b"a")])
    place.clock.advance(KEPT_SECONDS + 60)
    place.log.trim(grace=0)
    with pytest.raises(NotFound, match="took longer than a day, was discarded"):
        append.commit(batches, upto=1)
    assert stored(place.log) == []


def test_too_many_batches_for_one_commit_are_refused(place: Place) -> None:
    append = place.append()
    (batch,) = append.write([rows(b"a")])
    with pytest.raises(InvalidInput, match="at most 65,536 batches, and this has 65,537"):
        append.commit([batch] * (MOST_BATCHES + 1), upto=1)


@pytest.mark.matrix
def test_a_large_group_leaves_a_small_head(place: Place) -> None:
    append = place.append()
    batches = [batch for number in range(1000) for batch in append.write([rows(b"%d" % number)])]
    append.commit(batches, upto=1)
    assert len(place.log.head().tail) < 100
    assert stored(place.log) == [b"%d" % number for number in range(1000)]
    place.check()


def commit_twice(place: Place, broken: Callable[[FaultyStore], None]) -> None:
    """Two micro-batches; the first try of the second one is broken somewhere, and the whole is repeated."""
    place.put(b"a", upto=1)
    append = place.append(job="first")
    broken(place.store)
    try:
        staged = append.write([rows(b"b"), rows(b"c")])
        append.commit(staged, upto=2)
    except (StrandlineError, Crash):
        pass
    finally:
        place.store.heal()
        place.store.unhook()
    place.put(b"b", b"c", upto=2, job="second")
    place.put(b"d", upto=3, job="third")
    assert stored(place.log) == [b"a", b"b", b"c", b"d"]
    place.log.trim(grace=0)
    place.log.trim(grace=0)
    assert stored(place.log) == [b"a", b"b", b"c", b"d"]
    place.check()


@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_request_of_a_commit_loses_and_doubles_nothing(after: bool) -> None:
    deaths = 0
    for number in range(40):
        place = Place()
        reached: list[object] = []

        def break_it(store: FaultyStore, number: int = number, reached: list[object] = reached) -> None:
            seen = []

            def crash(call: Call) -> None:
                if (call.stage == "after") is after:
                    seen.append(call)
                    if len(seen) == number + 1:
                        reached.append(call)
                        raise Crash

            store.hook(crash)

        commit_twice(place, break_it)
        deaths += bool(reached)
        if not reached:
            break
    assert deaths >= 5


@pytest.mark.matrix
@pytest.mark.parametrize("path", ["staged/", "batches/", "head"])
def test_lost_answers_and_failures_lose_and_double_nothing(path: str) -> None:
    for times in (1, 3):
        commit_twice(Place(), partial(FaultyStore.lose_answers, times=times, path_prefix=path))
        for name in _WRITES:
            commit_twice(Place(), partial(_fail, name=name, times=times, path=path))


def _fail(store: FaultyStore, name: OperationName, times: int, path: str) -> None:
    store.fail_next(name, path_prefix=path, times=times)


def test_two_processes_that_commit_the_same_micro_batch_at_once_append_it_once(place: Place) -> None:
    one, other = place.append(job="one"), place.append(job="other")
    mine, theirs = one.write([rows(b"a")]), other.write([rows(b"a")])
    done: list[Receipt] = []

    def overtake(call: Call) -> None:
        if call.name == "put_if" and call.stage == "before" and not done:
            place.store.unhook()
            done.append(other.commit(theirs, upto=1))

    place.store.hook(overtake)
    assert one.commit(mine, upto=1) == done[0] == Receipt(0, 1)
    assert stored(place.log) == [b"a"]


def test_rows_are_cut_into_batches_of_a_bounded_size(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.log.object.staging.BATCH_BYTES", 1000)
    append = place.append()
    batches: Sequence[BatchListing] = append.write(rows(b"%03d" % number * 20) for number in range(50))
    assert len(batches) > 3
    append.commit(batches, upto=1)
    assert stored(place.log) == [b"%03d" % number * 20 for number in range(50)]


def test_a_store_that_copies_by_itself_is_used(tmp_path: object) -> None:
    log = open_log(f"file://{tmp_path}/log", create=True)
    append = StagedAppend(log.store, log.log_id, STREAM, "job")
    batches = append.write([rows(b"a")])
    append.commit(batches, upto=1)
    append.discard(batches)
    assert stored(log) == [b"a"]
    store: ObjectStore = log.store
    with pytest.raises(NotFound):
        store.copy("nothing", "else")  # type: ignore[attr-defined]


def test_a_source_may_begin_with_a_large_number(place: Place) -> None:
    microseconds = 1_794_900_000_000_000  # more than one append can advance
    assert place.put(b"a", upto=microseconds) == Receipt(0, 1)
    assert place.put(b"a", upto=microseconds) == Receipt(0, 1)
    assert place.put(b"b", upto=microseconds + 1_000_000) == Receipt(1, 1)
    place.check()


@pytest.mark.matrix
def test_a_commit_of_another_run_is_told_from_a_repeated_one_while_the_log_has_it(place: Place) -> None:
    ours, others = replace(place.append(), run="ours"), replace(place.append(), run="others")
    receipt = ours.commit(ours.write([rows(b"a")]), upto=1)
    for number in range(200):  # the entry moves into a chunk
        place.put(b"more", upto=1, writer=WriterId(UUID(int=1000 + number)))
    repeated = others.commit(others.write([rows(b"b")]), upto=1)
    assert repeated == receipt
    assert ours.listed_by_this_run(receipt)
    assert not others.listed_by_this_run(repeated)
    place.log.set_retention("bytes:1")
    place.log.trim(grace=0)
    assert others.listed_by_this_run(repeated)  # unknown by now
