"""A consumer that crashes, or loses an answer, at each operation: no batch is skipped, no acknowledged one repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from strandline.errors import OutOfOrderAck, StorageError
from strandline.followers.consumer.consumer import Consumer
from strandline.followers.consumer.progress import AckProgress, AckStep
from strandline.followers.consumer.reader import BatchReader
from strandline.log.queue.log_queue import ObjectLogQueue
from strandline.model.head import Entry
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import RetryingStore
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, Crash, Fault, Faults, FaultyStore
from tests.contracts.queues import QueuePlace
from tests.contracts.queues.places import first_to_come
from tests.followers.consumer.queue_places import ObjectLogPlace, PlaceKind, V1Place, filled
from tests.matrix_cases import some

BATCHES = 9
KINDS = [ObjectLogPlace, V1Place]


@dataclass
class Life:
    """One life of a consumer, with the requested acknowledgements and the durable ones."""

    place: QueuePlace
    line: ObjectStore
    last_acked: int | None = None
    tries: int = 1
    asked: int = 0
    promised: int = 0
    seen: list[int] = field(default_factory=list)
    consumer: Consumer | None = None

    def insist(self, action: Callable[[], object]) -> object:
        """Repeat the very same call when the store failed, as its errors allow."""
        for left in reversed(range(self.tries)):
            try:
                return action()
            except StorageError:
                if not left:
                    raise
        return None

    def open(self) -> Consumer:
        self.asked = max(self.asked, 0 if self.last_acked is None else self.last_acked + 1)
        self.consumer = self.place.open(self.line, ack_every=2, last_acked=self.last_acked)
        self.promised = max(self.promised, self.asked)
        return self.consumer

    def take(self) -> int:
        batch = self.insist(self.consumer.next_batch)
        self.seen.append(batch.sequence)
        return batch.sequence

    def ack(self, sequence: int, *, durable: bool) -> None:
        self.asked = sequence + 1
        self.insist(lambda: self.consumer.ack(sequence))
        if durable:
            self.promised = sequence + 1

    def run(self) -> None:
        """Open, read, acknowledge in every way, close."""
        self.insist(self.open)
        first = self.take()
        self.take()
        self.ack(first, durable=False)
        self.ack(first + 1, durable=True)
        handed_out = self.insist(lambda: self.consumer.next_descriptors(2))
        for descriptor in handed_out:
            self.seen.append(
                self.insist(lambda descriptor=descriptor: self.consumer.fetch_handle().fetch(descriptor)).sequence
            )
        self.asked = first + 4
        self.insist(lambda: self.consumer.ack_through(first + 3))
        self.promised = first + 4
        self.ack(self.take(), durable=False)
        self.insist(self.consumer.flush)
        self.promised = self.asked
        self.ack(self.take(), durable=False)
        self.insist(self.consumer.close)
        self.promised = self.asked


def check(life: Life) -> None:
    """The next consumer begins after the durable acknowledgements, at most after the requested ones."""
    place = life.place
    begins = first_to_come(place)
    assert life.promised <= begins, f"{begins} comes again though it was acknowledged durably"
    assert begins <= life.asked, f"{life.asked} was skipped though nobody acknowledged it"
    with place.open() as consumer:
        assert [batch.sequence for batch in consumer.batches()] == list(range(begins, BATCHES))
        if begins < BATCHES:
            consumer.ack_through(BATCHES - 1)
    assert first_to_come(place) == BATCHES


def lives(kind: PlaceKind, *, after: bool, last_acked: int | None = None) -> int:
    """Let a consumer crash at each operation of its life in turn; returns the number of crashes."""
    for number in count():
        place = filled(kind, BATCHES)
        line = FaultyStore(place.store)
        line.crash_at(number, after=after)
        life = Life(place, line, last_acked)
        try:
            life.run()
        except Crash:
            check(life)
        else:
            check(life)
            assert life.promised == (6 if last_acked is None else last_acked + 7)
            return number
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", some([True, False], 1), ids=["after", "before"])
def test_wherever_a_consumer_dies_a_new_one_continues_where_it_was(kind: PlaceKind, *, after: bool) -> None:
    assert lives(kind, after=after) >= 15


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_wherever_a_consumer_dies_that_acknowledges_at_opening_a_new_one_continues(
    kind: PlaceKind, *, after: bool
) -> None:
    assert lives(kind, after=after, last_acked=1) >= 15


@pytest.mark.parametrize("after", some([True, False], 1), ids=["after", "before"])
def test_wherever_a_consumer_dies_that_rewinds_its_slot_nothing_is_skipped(*, after: bool) -> None:
    deaths = 0
    for number in count():
        place = filled(ObjectLogPlace, BATCHES)
        place.log.set_retention("forever")
        with place.open() as consumer:
            consumer.next_descriptors(BATCHES)
            consumer.ack_through(6)
        line = FaultyStore(place.store)
        line.crash_at(number, after=after)
        try:
            assert place.open(line, last_acked=1).next_to_ack == 2
        except Crash:
            deaths += 1
            assert first_to_come(place) in (2, 7)
            place.log.trim()
            assert place.open(last_acked=1).next_to_ack == 2
        else:
            break
        assert [batch.sequence for batch in place.open().batches()] == list(range(2, BATCHES))
        assert place.log.head().slots == {"default": None}
    assert deaths >= 8


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", some(["before", "after", "late", "throttled"], 2))
def test_whichever_operation_fails_the_same_call_can_be_repeated(kind: PlaceKind, fault: Fault) -> None:
    for number in count():
        place = filled(kind, BATCHES)
        line = FaultyStore(place.store)

        def fail(call: Call, line: FaultyStore = line, number: int = number) -> None:
            if call.number == number and call.stage == "before":
                match fault:
                    case "before" | "after":
                        line.fail_next(after=fault == "after")
                    case "late":
                        line.delay_next("get", "put", "put_if")
                    case "throttled":
                        line.throttle_next()
            elif call.number == number + 2:
                line.land_late()

        line.hook(fail)
        life = Life(place, line, tries=4)
        life.run()
        assert life.promised == life.asked == 6
        assert life.seen == list(range(6)), f"{fault} at operation {number}"
        check(life)
        if number > len(line.log):
            return


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_whose_line_loses_every_third_answer_still_does_everything_once(kind: PlaceKind) -> None:
    for seed in range(40):
        place = filled(kind, BATCHES)
        line = FaultyStore(place.store, seed=seed, faults=Faults(after=0.3, before=0.1, late=0.1))
        life = Life(place, RetryingStore(line, env=Env(clock=ManualClock())), tries=20)
        life.run()
        line.heal()
        line.land_late()
        assert life.seen == list(range(6))
        assert life.promised == life.asked == 6
        check(life)


# --- broken twins ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_twin_that_takes_an_acknowledgement_for_durable_that_is_not_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = ObjectLogQueue.acknowledge

    def forget(self: ObjectLogQueue, through: Entry) -> None:
        if not isinstance(self._log.store, FaultyStore):
            honest(self, through)

    monkeypatch.setattr(ObjectLogQueue, "acknowledge", forget)
    with pytest.raises(AssertionError, match="comes again"):
        lives(ObjectLogPlace, after=False)


def test_a_twin_that_acknowledges_what_it_only_handed_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AckProgress.ack

    def ack_all(self: AckProgress, sequence: int) -> AckStep:
        honest(self, sequence)
        return self.ack_through(self.read - 1)

    monkeypatch.setattr(AckProgress, "ack", ack_all)
    place = filled(ObjectLogPlace, BATCHES)
    life = Life(place, FaultyStore(place.store))
    life.open()
    life.take(), life.take()
    life.ack(0, durable=False)
    with pytest.raises(AssertionError, match="skipped"):
        check(life)


def test_a_twin_that_moves_its_cursor_before_the_fetch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    peek = BatchReader.peek

    def hand_out_at_once(self: BatchReader, limit: int, since: int | None = None) -> list[Entry]:
        found = peek(self, limit, since)
        with self.state:
            self.progress.hand_out(found)
        return found

    monkeypatch.setattr(BatchReader, "peek", hand_out_at_once)
    monkeypatch.setattr(BatchReader, "hand_out", lambda *_: None)
    with pytest.raises((AssertionError, OutOfOrderAck)):
        test_whichever_operation_fails_the_same_call_can_be_repeated(ObjectLogPlace, "before")
