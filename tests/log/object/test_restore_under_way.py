"""An object log whose objects are copied back one by one, in any order: every state is right, or says what to do."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import strandline as sl
from strandline.errors import CorruptData, NotALog, NotFound, StrandlineError
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head import edits
from strandline.model.head import WriterId
from strandline.model.records import Op, record_batch
from tests.log.test_restored import put

RECORDS = 12
ADVICE = re.compile(r"[Rr]estore (it|the object)|restore the missing|check the address")


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with batches, chunks of its index, and two slots, one of them claimed."""
    folder = tmp_path_factory.mktemp("backup") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits, "CHUNK", 4)
        patch.setattr(edits, "SPILL_AT", 6)
        log = open_log(str(folder), create=True, retention="consumed")
        for number in range(RECORDS):
            put(log, b"%d" % number, value=b"%d" % number)
    log.slots.create("planned", 0)
    log.slots.create("work", 0)
    log.slots.claim("work", "worker").advance(log.cursor_at(5))
    return folder


def objects(backup: Path) -> list[str]:
    found = [str(path.relative_to(backup)) for path in backup.rglob("*") if path.is_file()]
    return sorted(name for name in found if not Path(name).name.startswith("."))


def copy(backup: Path, name: str, to: Path) -> None:
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(backup / name, to / name)


def values(log: ObjectLog) -> list[bytes]:
    return [value for batch in log.read() for value in batch.column("value").to_pylist()]


def followed(log: ObjectLog, slot: str | None = None) -> int:
    store = sl.followers.MemoryStore()
    sl.follow(log, store, slot, upto="end")
    return len(list(store.range()))


def consumed(log: ObjectLog) -> int:
    with sl.Consumer(log, slot="work", trim_every=None) as consumer:
        return consumer.next_batch().records["offset"][0].as_py()


def append(log: ObjectLog) -> int:
    batch = record_batch(timestamps=[1], ops=[Op.PUT], keys=[b"new"], values=[b"new"])
    return log.append(batch, writer=WriterId(uuid4()), number=0).result(60).first


def produce(log: ObjectLog) -> int:
    with closing(log.producer()) as producer:
        return producer.append(key=b"new", value=b"new").result(60).first


LOOKS: dict[str, tuple[Callable[[ObjectLog], Any], Any]] = {
    "read": (values, [b"%d" % number for number in range(RECORDS)]),
    "follow": (followed, RECORDS),
    "follow by a slot": (lambda log: followed(log, "planned"), RECORDS),
    "consume": (consumed, 5),
    "bounds": (lambda log: log.bounds().next, RECORDS),
    "slots": (lambda log: [(slot.name, slot.position) for slot in log.slots.list()], None),
    "one slot": (lambda log: log.slots.get("work").position, 5),
    "floor": (lambda log: log.slots.floor(), 0),
    "claim": (lambda log: log.slots.claim("work", "other").name, "work"),
    "put a slot elsewhere": (lambda log: log.slots.reset("work", 3).position, 3),
    "create a slot": (lambda log: log.slots.create("new", 3).position, 3),
    "drop a slot": (lambda log: log.slots.drop("planned"), None),
    "trim": (lambda log: log.trim(), None),
    "append": (append, RECORDS),
    "produce": (produce, RECORDS),
}
"""What anybody may try meanwhile, and what it has to be if it is answered; None if anything is."""


def looks(place: Path) -> Iterator[tuple[str, Any]]:
    """Each read call on a copy of its own: the name, and the right result or the error, which says what to do."""
    for name, (look, expected) in LOOKS.items():
        at = place.with_name("looked at")
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(place, at)
        try:
            found = look(open_log(str(at)))
        except StrandlineError as error:
            found = error
        if isinstance(found, StrandlineError):
            assert ADVICE.search(str(found)), f"{name}: {type(found).__name__}: {found}"
        else:
            assert expected is None or found == expected, name
        yield name, found


def test_with_any_one_object_missing_each_call_is_right_or_says_what_to_restore(backup, tmp_path):
    names = objects(backup)
    assert {Path(name).parts[0] for name in names} >= {"log.json", "head", "batches", "chunks", "slots"}
    of_each_kind = {Path(name).parts[0]: name for name in names if not name.startswith("slots/")}
    for missing in (*of_each_kind.values(), *(name for name in names if name.startswith("slots/"))):
        place = tmp_path / "log"
        shutil.rmtree(place, ignore_errors=True)
        for name in names:
            if name != missing:
                copy(backup, name, place)
        refused = [found for _, found in looks(place) if isinstance(found, StrandlineError)]
        assert refused, f"nobody notices that {missing} is missing"
        assert any(Path(missing).name in str(error) for error in refused) or missing == "log.json", missing


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 6))])
def test_in_whatever_order_objects_come_back_no_call_takes_what_is_there_for_the_whole(backup, tmp_path, seed):
    names = objects(backup)
    random.Random(seed).shuffle(names)
    place = tmp_path / "log"
    place.mkdir()
    for name in names[:-1]:
        copy(backup, name, place)
        for _ in looks(place):
            pass
    copy(backup, names[-1], place)
    assert [found for name, found in looks(place) if isinstance(found, StrandlineError)] == []


def test_a_slot_whose_object_is_lost_for_good_is_dropped_and_created_again(backup, tmp_path):
    place = tmp_path / "log"
    shutil.copytree(backup, place)
    log = open_log(str(place))
    held = log.slots.claim("work", "worker")
    (place / "slots" / "work.json").unlink()
    for call in (
        lambda: log.slots.get("work"),
        lambda: log.slots.reset("work", 5),
        lambda: log.slots.claim("work", "other"),
        lambda: held.advance(log.cursor_at(7)),
        held.touch,
        held.state,
        lambda: consumed(log),
    ):
        with pytest.raises(CorruptData, match=r"work\.json is missing .* restore the object; or, .* drop the slot"):
            call()
    with pytest.raises(NotFound, match="There is no slot 'other'"):
        log.slots.get("other")
    log.slots.drop("work")
    assert log.slots.create("work", 5).position == 5
    assert consumed(log) == 5


def test_a_log_without_its_identity_says_which_object_is_missing(backup, tmp_path):
    place = tmp_path / "log"
    shutil.copytree(backup, place)
    (place / "log.json").unlink()
    with pytest.raises(NotALog, match=r"log\.json is missing .* restore the object; or"):
        open_log(str(place))
    assert values(open_log(str(place), create=True, retention="consumed")) == values(open_log(str(backup)))


def test_the_head_of_another_log_is_refused_by_every_call_that_would_write_it(backup, tmp_path):
    place, other = tmp_path / "log", tmp_path / "other"
    shutil.copytree(backup, place)
    put(open_log(str(other), create=True), b"a")
    shutil.copy2(other / "head", place / "head")
    before = (place / "head").read_bytes()
    for name in LOOKS.keys() - {"one slot"}:  # which needs nothing of the head
        look, _ = LOOKS[name]
        with pytest.raises(CorruptData, match="belongs to log"):
            look(open_log(str(place)))
        assert (place / "head").read_bytes() == before, name
