"""The creator of a slot may crash at any moment: the next process that uses the slot finishes its creation."""

import itertools

import pytest

import strandline as sl
from strandline.errors import CorruptData
from strandline.log.object import open_log
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.interrupts import interruptions
from tests.matrix_cases import some


def claimed(log):
    return log.slots.claim("s", "me").state().position


def consumed(log):
    with sl.Consumer(log, slot="s", trim_every=None) as consumer:
        return [batch.values for batch in consumer.batches(parallel=1)]


def followed(log):
    return sl.follow(log, sl.followers.MemoryStore(), "s", upto="end").next


USES = {"claim_slot": (claimed, 0), "consumer": (consumed, [[b"v"]]), "follow": (followed, 1)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some places are in __del__
@pytest.mark.parametrize("use", some(USES, 2))
@pytest.mark.parametrize("was_there", [False, True], ids=["new name", "name of a dropped slot"])
def test_a_slot_whose_creator_died_anywhere_can_be_used(use, was_there):
    names = itertools.count()
    call, answer = USES[use]

    def fresh():
        log = sl.open(f"memory://slot-creation-{use}-{was_there}-{next(names)}", create=True)
        with log.producer() as producer:
            producer.append(key=b"k", value=b"v")
        if was_there:
            log.slots.create("s", 1)
            log.slots.claim("s", "somebody")
            log.slots.drop("s")
        return log

    now, listed = [fresh()], 0
    for place in interruptions(lambda: now[0].slots.create("s", 0), within="strandline.log.object.slots"):
        log = now[0]
        if "s" in log.head().slots:
            listed += 1
            assert all(not state.dropped for state in log.slots.list())
            assert log.slots.floor() == 0, f"died at {place}"
            assert call(log) == answer, f"died at {place}"
        now[0] = fresh()
    assert listed > 2


def test_a_slot_that_is_created_while_it_is_read_is_not_taken_for_lost():
    place = PlainStore()
    log = open_log(place, create=True)
    line = FaultyStore(place)
    reader = open_log(line)
    looks = itertools.count()

    def create(call):
        # It has found no object of the slot, and reads the head to find out why.
        if (call.name, call.path, call.stage) == ("get", "head", "before") and next(looks) == 0:
            log.slots.create("s", 0)

    line.hook(create)
    assert reader.slots.get("s").position == 0
    place.delete("slots/s.json")
    with pytest.raises(CorruptData, match="is missing although the head names it"):
        reader.slots.get("s")
