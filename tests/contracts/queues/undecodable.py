"""Contract of batches that cannot be decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strandline.errors import (
    CorruptData,
    Fenced,
    InvalidInput,
    NotFound,
    OutOfOrderAck,
    TooManyDeadLetters,
    TransientStorageError,
)
from strandline.followers.consumer.consumer import Consumer
from strandline.testing.faulty import Call, FaultyStore
from tests.contracts.queues.places import QueueFixtures, QueuePlace, first_to_come


class PoisonContract(QueueFixtures):
    """An unreadable batch raises and leaves the cursor, or is set aside and counted."""

    # --- poison ---------------------------------------------------------------------------------------------

    def damage(self, place: QueuePlace, path: str) -> bytes:
        """Truncate a batch's object; returns its former bytes."""
        whole = bytes(place.store.get(path).data)
        place.store.put(path, whole[:-3])
        return whole

    def kept(self, place: QueuePlace) -> list[dict[str, Any]]:
        """The dead letters, in order."""
        names = [item.path for item in place.store.list(place.letters) if item.path.endswith(".json")]
        return [json.loads(bytes(place.store.get(name).data)) for name in names]

    def read_all(self, consumer: Consumer, *, way: str) -> list[int]:
        """The remaining sequences."""
        if way == "batches":
            return [batch.sequence for batch in consumer.batches()]
        found = []
        while (batch := consumer.next_batch()) is not None:
            found.append(batch.sequence)
        return found

    @pytest.mark.parametrize("way", ["next_batch", "batches"])
    def test_a_damaged_object_raises_an_error_that_names_it_and_leaves_the_cursor(
        self, five: QueuePlace, way: str
    ) -> None:
        path = self.locations(five)[1]
        whole = self.damage(five, path)
        consumer = five.open()
        for _ in range(2):
            with pytest.raises(CorruptData, match=path):
                self.read_all(consumer, way=way)
            assert consumer.next_to_read == 1
        five.store.put(path, whole)
        assert self.read_all(consumer, way=way) == [1, 2, 3, 4]
        assert (consumer.dead_letters, self.kept(five)) == (0, [])

    @pytest.mark.parametrize("way", ["next_batch", "batches"])
    def test_a_missing_object_raises_an_error_that_names_it_and_leaves_the_cursor(
        self, five: QueuePlace, way: str
    ) -> None:
        path = self.locations(five)[0]
        five.store.delete(path)
        consumer = five.open()
        for _ in range(2):
            with pytest.raises(NotFound, match=path):
                self.read_all(consumer, way=way)
            assert consumer.next_to_read == 0

    @pytest.mark.parametrize("way", ["next_batch", "batches"])
    @pytest.mark.parametrize("poisoned", [[0], [2], [4], [1, 2], [0, 1, 2, 3, 4]])
    def test_poison_is_set_aside_and_reading_goes_on(self, five: QueuePlace, poisoned: list[int], way: str) -> None:
        paths = self.locations(five)
        for number in poisoned:
            self.damage(five, paths[number])
        consumer = five.open(on_poison="dead-letter")
        good = [number for number in range(5) if number not in poisoned]
        assert self.read_all(consumer, way=way) == good
        assert consumer.dead_letters == len(poisoned)
        letters = self.kept(five)
        assert [letter["descriptor"]["sequence"] for letter in letters] == poisoned
        for letter in letters:
            path = letter["descriptor"]["location"]
            assert path in letter["reason"]
            assert bytes(five.store.get(letter["bytes"]).data) == bytes(five.store.get(path).data)
        # A batch that was set aside counts as acknowledged in its turn, also the first or the last.
        for number in good:
            consumer.ack(number)
        consumer.flush()
        assert first_to_come(five) == 5

    def test_of_a_missing_object_only_the_descriptor_is_kept(self, five: QueuePlace) -> None:
        path = self.locations(five)[1]
        five.store.delete(path)
        consumer = five.open(on_poison="dead-letter")
        assert self.read_all(consumer, way="next_batch") == [0, 2, 3, 4]
        (letter,) = self.kept(five)
        assert (letter["descriptor"]["location"], letter["bytes"]) == (path, None)

    def test_poison_behind_what_is_not_acknowledged_yet_waits_for_its_turn(self, five: QueuePlace) -> None:
        self.damage(five, self.locations(five)[1])
        consumer = five.open(on_poison="dead-letter")
        self.read_all(consumer, way="next_batch")
        consumer.flush()
        assert first_to_come(five) == 0
        consumer = five.open(on_poison="dead-letter")
        self.read_all(consumer, way="next_batch")
        consumer.ack(0)
        with pytest.raises(OutOfOrderAck, match="the next one is 2"):
            consumer.ack(1)
        consumer.ack(2)
        consumer.flush()
        assert first_to_come(five) == 3

    def test_more_poison_than_the_limit_raises_and_leaves_the_cursor(
        self, five: QueuePlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strandline.followers.consumer.reader.MOST_DEAD_LETTERS", 2)
        for path in self.locations(five)[1:4]:
            self.damage(five, path)
        consumer = five.open(on_poison="dead-letter")
        for _ in range(2):
            with pytest.raises(TooManyDeadLetters, match="limit") as raised:
                self.read_all(consumer, way="next_batch")
            assert isinstance(raised.value.__cause__, CorruptData)
            assert (consumer.next_to_read, consumer.dead_letters) == (3, 2)
        assert len(self.kept(five)) == 2

    @pytest.mark.parametrize("way", ["next_batch", "batches"])
    def test_a_store_that_fails_is_not_poison(self, five: QueuePlace, line: FaultyStore, way: str) -> None:
        line.fail_next(path_prefix=self.locations(five)[0])
        consumer = five.open(line, on_poison="dead-letter")
        with pytest.raises(TransientStorageError):
            self.read_all(consumer, way=way)
        assert self.read_all(consumer, way=way) == [0, 1, 2, 3, 4]
        assert (consumer.dead_letters, self.kept(five)) == (0, [])

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_poison_that_could_not_be_kept_is_not_passed_over(
        self, five: QueuePlace, line: FaultyStore, *, after: bool
    ) -> None:
        self.damage(five, self.locations(five)[0])
        consumer = five.open(line, on_poison="dead-letter")
        for _ in range(2):  # the bytes, then the letter
            line.fail_next("put", path_prefix=five.letters, after=after)
            with pytest.raises(TransientStorageError):
                consumer.next_batch()
            assert (consumer.next_to_read, consumer.dead_letters) == (0, 0)
        assert self.read_all(consumer, way="next_batch") == [1, 2, 3, 4]
        assert [letter["descriptor"]["sequence"] for letter in self.kept(five)] == [0]

    def test_a_fenced_consumer_sets_nothing_aside(self, five: QueuePlace, line: FaultyStore) -> None:
        path = self.locations(five)[0]
        old = five.open(line, on_poison="dead-letter")

        def take_over(call: Call) -> None:
            if call.path == path and call.stage == "before":
                line.unhook()
                five.open()
                five.store.delete(path)  # as if a newer consumer had passed it, and it was trimmed

        line.hook(take_over)
        with pytest.raises(Fenced):
            old.next_batch()
        assert (old.dead_letters, self.kept(five)) == (0, [])

    def test_a_caller_that_fetches_by_descriptors_can_dead_letter_a_batch(
        self, five: QueuePlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strandline.followers.consumer.reader.MOST_DEAD_LETTERS", 1)
        self.damage(five, self.locations(five)[1])
        consumer = five.open()
        descriptors = consumer.next_descriptors(3)
        with pytest.raises(CorruptData):
            consumer.fetch_handle().fetch(descriptors[1])
        where = consumer.dead_letter(descriptors[1], "not for us")
        assert where.startswith(f"{five.store.url}/{five.letters}")
        assert [letter["reason"] for letter in self.kept(five)] == ["not for us"]
        consumer.ack(0)
        consumer.ack(2)
        with pytest.raises(InvalidInput, match="cannot be set aside"):
            consumer.dead_letter(descriptors[0], "too late")
        (fourth,) = consumer.next_descriptors(1)
        with pytest.raises(TooManyDeadLetters):
            consumer.dead_letter(fourth, "one too many")
        consumer.flush()
        assert first_to_come(five) == 3
