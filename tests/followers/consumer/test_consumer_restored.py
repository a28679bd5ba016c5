"""A queue that is restored from a copy under a running consumer, and grows differently: that gets ``Diverged``."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.errors import Diverged, Fenced, SlotInvalid


def opened(kind: str, folder: Path) -> Any:
    return sl.open(str(folder), create=True) if kind == "own" else open_queue(str(folder))


def produce(log: Any, *entries: bytes) -> None:
    with log.producer() as producer:
        for entry in entries:
            producer.produce([entry])
            producer.flush()


class Restored:
    """A queue of three batches that was backed up, read to its fifth, put back, and has grown to six others."""

    def __init__(self, kind: str, place: Path, *, again: tuple[bytes, ...] = (b"x", b"y", b"z")) -> None:
        folder = place / "queue"
        log = opened(kind, folder)
        produce(log, b"a", b"b", b"c")
        self.consumer = sl.Consumer(log, trim_every=None)
        shutil.copytree(folder, place / "backup")
        produce(log, b"d", b"e")
        self.given = [self.consumer.next_batch() for _ in range(5)]
        shutil.rmtree(folder)
        shutil.copytree(place / "backup", folder)
        self.log = opened(kind, folder)
        produce(self.log, *again)

    def rest(self) -> list[Any]:
        with sl.Consumer(self.log, trim_every=None) as consumer:
            return [batch.values for batch in consumer.batches()]


ALL = [[b"a"], [b"b"], [b"c"], [b"x"], [b"y"], [b"z"]]


@pytest.fixture(params=["own", "v1"])
def restored(request: pytest.FixtureRequest, tmp_path: Path) -> Restored:
    return Restored(request.param, tmp_path)


def test_no_call_passes_over_batches_of_the_new_history(restored: Restored) -> None:
    consumer = restored.consumer
    for call in (
        consumer.next_batch,
        lambda: consumer.next_descriptors(1),
        lambda: next(consumer.batches()),
        lambda: consumer.descriptors_between(1, 2),
        consumer.flush,
    ):
        with pytest.raises(Diverged, match="restored from a copy"):
            call()
    assert restored.rest() == ALL


def test_batches_of_the_old_history_acknowledge_none_of_the_new(restored: Restored) -> None:
    with pytest.raises(Diverged, match="restored from a copy"):
        restored.consumer.ack_through(4)
    assert restored.rest() == ALL


def test_batches_of_both_histories_can_still_be_acknowledged(restored: Restored) -> None:
    restored.consumer.ack_through(2)
    assert restored.rest() == ALL[3:]


@pytest.mark.parametrize("kind", ["own", "v1"])
def test_a_queue_that_is_shorter_than_its_consumer_has_read_is_not_taken_for_an_empty_one(
    kind: str, tmp_path: Path
) -> None:
    restored = Restored(kind, tmp_path, again=(b"x",))
    with pytest.raises(Diverged, match="restored from a copy"):
        restored.consumer.next_batch()


def test_a_slot_is_not_advanced_by_a_cursor_of_another_history(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = sl.open(str(folder), create=True)
    produce(log, b"a")
    log.slots.create("s", 0)
    slot = log.slots.claim("s", "me")
    shutil.copytree(folder, tmp_path / "backup")
    produce(log, b"b", b"c")
    stored = log.end()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    produce(log, b"x", b"y")
    with pytest.raises(Diverged, match="restored from a copy"):
        slot.advance(stored)
    assert slot.state().position == 0
    slot.advance(log.cursor_at(1))
    assert slot.state().position == 1


def test_a_consumer_that_was_given_nothing_yet_passes_over_no_batch_of_the_new_history(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = sl.open(str(folder), create=True)
    produce(log, b"a")
    consume_all(log)
    shutil.copytree(folder, tmp_path / "backup")
    produce(log, b"b", b"c")
    consume_all(log)
    waiting = sl.Consumer(log, holder="service", trim_every=None)  # the same holder again keeps its epoch
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    produce(log, b"x", b"y", b"z")
    for call in (waiting.next_batch, lambda: waiting.next_descriptors(1), lambda: list(waiting), waiting.flush):
        with pytest.raises(Diverged, match="restored from a copy"):
            call()
    with sl.Consumer(log, holder="service", trim_every=None) as again:
        assert [batch.values for batch in again] == [[b"x"], [b"y"], [b"z"]]


def test_a_consumer_of_a_slot_that_the_copy_did_not_have_is_not_advised_to_go_on_after_what_it_acknowledged(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "log"
    log = sl.open(str(folder), create=True)
    produce(log, b"a")
    shutil.copytree(folder, tmp_path / "backup")
    produce(log, b"b")
    consumer = sl.Consumer(log, trim_every=None)
    assert [consumer.next_batch().sequence for _ in range(2)] == [0, 1]
    consumer.ack(0)
    consumer.flush()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    produce(log, b"x")
    with pytest.raises(SlotInvalid, match="restored from a copy that did not have it"):
        consumer.next_batch()
    with sl.Consumer(log, trim_every=None) as again:
        assert [batch.values for batch in again] == [[b"a"], [b"x"]]


def test_of_two_consumers_with_one_epoch_after_a_restore_only_the_later_continues(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = sl.open(str(folder), create=True)
    produce(log, b"a", b"b")
    log.slots.create("default", 0)
    shutil.copytree(folder, tmp_path / "backup")
    older = sl.Consumer(log, trim_every=None)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    later = sl.Consumer(log, trim_every=None)
    assert later.next_batch().sequence == 0
    for call in (older.next_batch, older.flush):
        with pytest.raises(Fenced, match="must stop"):
            call()
    later.ack_through(0)
    assert [batch.values for batch in later] == [[b"b"]]


def consume_all(log: Any) -> None:
    with sl.Consumer(log, holder="service", trim_every=None) as consumer:
        for batch in consumer:
            consumer.ack(batch.sequence)
