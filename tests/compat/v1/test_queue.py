"""The consumer side of a queue of version 1, by itself and through the queue API."""

from __future__ import annotations

import json
import pickle
from base64 import b64decode

import pytest

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.compat.v1.queue import V1Queue
from strandline.errors import (
    CorruptData,
    CursorExpired,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    OutOfOrderAck,
    TransientStorageError,
)
from strandline.log.queue.contract import Fetcher, Queue
from strandline.model.head import Descriptor
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.compat.v1.filled_queues import append, fill, foreign_batch, manifest_in, opened, paths


@pytest.fixture
def store() -> PlainStore:
    """Batches 5, 6 and 7 of another implementation, whose consumer had epoch 2."""
    store = PlainStore()
    fill(store, (b"a", b"b"), (b"c",), (b"d",), first=5, epoch=2)
    return store


@pytest.fixture
def queue(store) -> V1Queue:
    return V1Queue(opened(store))


def looked(queue: V1Queue, since: int, limit: int | None = None) -> list[int]:
    return [descriptor.sequence for descriptor in queue.peek(since, limit).descriptors]


def test_a_v1_queue_satisfies_the_protocols(queue):
    assert isinstance(queue, Queue)
    assert isinstance(queue.fetcher(), Fetcher)
    queue.claim("me", None)
    assert all(isinstance(descriptor, Descriptor) for descriptor in queue.peek(5).descriptors)
    assert queue.url == "plain://test"


# --- claiming --------------------------------------------------------------------------------------------------------


def test_a_claim_raises_the_epoch_and_begins_with_the_first_listed_batch(store, queue):
    before = manifest_in(store)
    assert queue.claim("me", None) == 5
    after = manifest_in(store)
    assert (after.epoch, after.entries, after.next_sequence) == (3, before.entries, 8)


def test_a_claim_of_a_queue_without_manifest_creates_it():
    store = PlainStore()
    assert V1Queue(opened(store)).claim("me", None) == 0
    assert manifest_in(store).epoch == 1


def test_a_claim_of_an_empty_queue_begins_where_the_next_batch_will_be(store, queue):
    queue.claim("me", 7)
    assert V1Queue(opened(store)).claim("you", None) == 8


def test_a_claim_with_last_acked_acknowledges_through_it_in_the_same_write(store, queue):
    assert queue.claim("me", 5) == 6
    assert [entry.sequence for entry in manifest_in(store).entries] == [6, 7]
    assert queue.writes().done == 1
    assert V1Queue(opened(store)).claim("you", 4 + 1) == 6


def test_a_claim_from_which_batches_are_gone_raises_and_claims_nothing(store, queue):
    before = manifest_in(store)
    with pytest.raises(CursorExpired, match=r"Batch 4 .* begins at 5"):
        queue.claim("me", 3)
    assert manifest_in(store) == before
    queue.claim("me", 7)
    with pytest.raises(CursorExpired):
        V1Queue(opened(store)).claim("you", 6)


def test_a_future_last_acked_is_accepted_on_an_empty_queue(store, queue):
    with pytest.raises(Diverged):
        queue.claim("me", 100)
    queue.claim("me", 7)
    other = V1Queue(opened(store))
    assert other.claim("you", 100) == 101
    append(opened(store), b"x", number=0)
    assert looked(other, 101) == []
    assert other.peek(101).length == 1


def test_every_claim_is_a_new_one_because_the_format_has_no_holder(store, queue):
    queue.claim("me", None)
    V1Queue(opened(store)).claim("me", None)
    with pytest.raises(Fenced):
        queue.peek(5)


# --- looking ---------------------------------------------------------------------------------------------------------


def test_a_read_gives_consecutive_batches_and_how_many_there_are(queue):
    queue.claim("me", None)
    assert looked(queue, 5) == [5, 6, 7]
    assert looked(queue, 6, 1) == [6]
    assert looked(queue, 8) == []
    assert looked(queue, 5, 0) == []
    assert queue.peek(7).length == 3
    with pytest.raises(CursorExpired):
        queue.peek(4)


def test_a_replay_returns_the_batches_of_a_range_or_raises_if_some_are_gone(queue):
    queue.claim("me", 5)
    assert [entry.sequence for entry in queue.between(6, 7)] == [6, 7]
    assert [entry.sequence for entry in queue.between(7, 100)] == [7]
    assert queue.between(7, 6) == ()
    with pytest.raises(CursorExpired, match="Batch 5"):
        queue.between(5, 6)


def test_a_fenced_consumer_gets_fenced_from_every_call_that_touches_the_manifest_and_changes_nothing(store, queue):
    queue.claim("me", None)
    held = queue.peek(5).descriptors
    V1Queue(opened(store)).claim("you", None)
    before = manifest_in(store)
    for call in (lambda: queue.peek(5), lambda: queue.between(5, 6), lambda: queue.acknowledge(held[0])):
        with pytest.raises(Fenced, match="epoch 4"):
            call()
    assert manifest_in(store) == before
    assert queue.fetcher().fetch(held[0])[0].column("value").to_pylist() == [b"a", b"b"]


# --- acknowledging ---------------------------------------------------------------------------------------------------


def test_acknowledging_drops_everything_through_a_batch_durably(store, queue):
    queue.claim("me", None)
    _, second, third = queue.peek(5).descriptors
    queue.acknowledge(second)
    assert [entry.sequence for entry in manifest_in(store).entries] == [7]
    writes = queue.writes().done
    queue.acknowledge(second)
    assert queue.writes().done == writes
    queue.acknowledge(third)
    assert manifest_in(store).entries == ()
    assert manifest_in(store).next_sequence == 8


def test_acknowledging_needs_a_claim(store, queue):
    with pytest.raises(InvalidInput, match="claimed"):
        queue.acknowledge(manifest_in(store).entries[0])


def test_a_failed_acknowledgement_changes_nothing_and_may_be_repeated(store):
    line = FaultyStore(store)
    queue = V1Queue(opened(line))
    queue.claim("me", None)
    (first, *_) = queue.peek(5).descriptors
    with line.down(), pytest.raises((OutcomeUnknown, TransientStorageError)):
        queue.acknowledge(first)
    assert [entry.sequence for entry in manifest_in(store).entries] == [5, 6, 7]
    queue.acknowledge(first)
    assert [entry.sequence for entry in manifest_in(store).entries] == [6, 7]


def test_lost_races_are_counted(store):
    line = FaultyStore(store)
    queue, rival = V1Queue(opened(line)), opened(store, seed=9)
    queue.claim("me", None)
    (first, *_) = queue.peek(5).descriptors

    def race(call) -> None:
        if call.name == "put_if" and call.stage == "before":
            line.unhook()
            append(rival, b"x", number=0)

    line.hook(race)
    queue.acknowledge(first)
    assert [entry.sequence for entry in manifest_in(store).entries] == [6, 7, 8]
    assert (queue.writes().done, queue.writes().lost) == (3, 1)


# --- fetching and dead letters ---------------------------------------------------------------------------------------


def test_a_fetcher_can_be_sent_elsewhere_and_equal_descriptors_give_equal_batches(tmp_path):
    store = LocalStore(str(tmp_path / "queue"))
    (entry,) = fill(store, (b"a", b"b")).entries
    fetcher = V1Queue(opened(store)).fetcher()
    copy = pickle.loads(pickle.dumps(fetcher))
    assert copy.fetch(pickle.loads(pickle.dumps(entry))) == fetcher.fetch(entry)
    assert bytes(copy.raw(entry)) == foreign_batch(b"a", b"b")


def test_a_damaged_or_missing_object_is_named(store, queue):
    first, second, _ = manifest_in(store).entries
    store.put(first.location, b"rubbish")
    store.delete(second.location)
    with pytest.raises(CorruptData, match=r"ingest/part-5\.batch"):
        queue.fetcher().fetch(first)
    for read in (queue.fetcher().fetch, queue.fetcher().raw):
        with pytest.raises(NotFound, match=r"ingest/part-6\.batch"):
            read(second)


def test_a_dead_letter_keeps_descriptor_and_bytes_beside_the_data(store):
    clock = ManualClock()
    queue = V1Queue(opened(store, clock=clock))
    first, second, _ = manifest_in(store).entries
    store.put(first.location, b"rubbish")
    store.delete(second.location)
    where = [queue.dead_letter(entry, "because") for entry in (first, second, second)]
    assert paths(store, "ingest-dead/") == [
        f"ingest-dead/{5:020d}.batch",
        f"ingest-dead/{5:020d}.json",
        f"ingest-dead/{6:020d}.json",
    ]
    assert store.get(f"ingest-dead/{5:020d}.batch").data == b"rubbish"
    letters = [json.loads(store.get(path.removeprefix("plain://test/")).data) for path in where[:2]]
    assert [letter["reason"] for letter in letters] == ["because"] * 2
    assert letters[0]["descriptor"]["location"] == first.location
    assert b64decode(letters[0]["descriptor"]["metadata"][0]["payload"]) == b"m0"
    assert letters[1]["bytes"] is None


# --- read by a consumer ----------------------------------------------------------------------------------------------


def consumer(store, **options) -> sl.Consumer:
    return sl.Consumer(opened(store), trim_every=None, env=Env(clock=ManualClock()), **options)


def test_the_queue_api_consumes_what_others_produced_from_5_on(store):
    with consumer(store) as taken:
        batches = [taken.next_batch() for _ in range(3)]
        assert [batch.sequence for batch in batches] == [5, 6, 7]
        assert batches[0].values == [b"a", b"b"]
        assert batches[0].metadata[0].payload == b"m0"
        assert taken.next_batch() is None
        with pytest.raises(OutOfOrderAck, match="5"):
            taken.ack(6)
        taken.ack(5)
        taken.ack(6)
    assert [entry.sequence for entry in manifest_in(store).entries] == [7]
    with consumer(store) as again:
        assert again.next_batch().sequence == 7


def test_the_length_after_an_acknowledgement_is_that_of_the_manifest_just_written(store):
    with consumer(store) as taking:
        taking.next_descriptors(2)
        before = len(taking)
        for number in range(3):
            append(opened(store), b"more", by=9, number=number)  # another process, which this one does not see
        taking.ack_through(taking.next_to_ack)
        assert len(taking) == len(manifest_in(store).entries) == before + 2


def test_the_queue_api_opens_a_queue_by_its_address_and_format(tmp_path):
    with open_queue(str(tmp_path)).producer() as producer:
        producer.produce([b"a"], metadata=b"m")
    with sl.Consumer(str(tmp_path), format="queue-v1", trim_every=None) as taken:
        batch = taken.next_batch()
        assert (batch.values, batch.metadata[0].payload) == ([b"a"], b"m")
        taken.ack_through(batch.sequence)
    assert open_queue(str(tmp_path)).bounds().first == 1


def test_a_poisoned_batch_is_set_aside_and_the_next_one_comes(store):
    store.put("ingest/part-5.batch", b"rubbish")
    with consumer(store, on_poison="dead-letter") as taken:
        batch = taken.next_batch()
        assert batch.sequence == 6
        taken.ack_through(6)
    assert [entry.sequence for entry in manifest_in(store).entries] == [7]
    assert f"ingest-dead/{5:020d}.json" in paths(store)


def test_a_failed_fetch_leaves_the_read_cursor_where_it_was(store):
    line = FaultyStore(store)
    with consumer(line) as taken:
        line.fail_next("get", path_prefix="ingest/part-5")
        with pytest.raises(TransientStorageError):
            taken.next_batch()
        assert taken.next_batch().sequence == 5
