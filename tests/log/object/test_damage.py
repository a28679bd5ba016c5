"""Damaged, missing and newer objects: the error names the object and says what to do, and nothing is changed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from strandline.errors import CorruptData, NotALog, NotFound, StrandlineError, UnsupportedVersion, WrongKind
from strandline.formats.json.checked import with_checksum
from strandline.log.object import ObjectLog, open_log
from strandline.model.cursor import Bounds
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ObjectStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import paths
from tests.contracts.logs import content, fetched, writer_named
from tests.contracts.slots import append

SPILLED = 120


@pytest.fixture
def place() -> PlainStore:
    return PlainStore()


@pytest.fixture
def log(place: PlainStore) -> ObjectLog:
    """A log of three records in two batches, with a slot."""
    log = open_log(place, create=True)
    append(log, b"a", b"b", number=0)
    append(log, b"c", number=1)
    log.slots.create("billing", 1)
    return log


@pytest.fixture
def spilled(place: PlainStore) -> ObjectLog:
    """A log with a chunk."""
    log = open_log(place, create=True)
    for number in range(SPILLED):
        append(log, b"%d" % number, number=number)
    assert len(paths(place, "chunks/")) == 1
    return log


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flipped,
    "a cut end": lambda data: data[:-5],
    "half of it": lambda data: data[: len(data) // 2],
    "nothing left": lambda _: b"",
    "zeros": lambda data: bytes(len(data)),
    "bytes behind it": lambda data: data + b"more",
    "something else": lambda _: b"<html>504 Gateway Timeout</html>",
}
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())


def spoil(place: PlainStore, path: str, damage: Callable[[bytes], bytes]) -> None:
    place.put(path, damage(bytes(place.get(path).data)))


def snapshot(place: ObjectStore) -> dict[str, bytes]:
    return {path: bytes(place.get(path).data) for path in paths(place)}


def complaint(action: Callable[[], object], kind: type[StrandlineError], place: ObjectStore) -> str:
    """The error of an action; it must be of this class, not retryable, and change nothing."""
    before = snapshot(place)
    with pytest.raises(kind) as caught:
        action()
    assert not caught.value.retryable
    assert snapshot(place) == before
    return str(caught.value)


class TestBatch:
    @damaged
    def test_a_damaged_batch_is_named_and_the_others_are_still_read(
        self, place: PlainStore, log: ObjectLog, damage: Callable[[bytes], bytes]
    ) -> None:
        location = log.head().tail[0].location
        spoil(place, location, damage)
        reader = open_log(place)
        first, second = reader.plan(reader.start())
        message = complaint(first.fetch, CorruptData, place)
        assert f"{place.url}/{location}" in message
        assert "damaged" in message
        assert fetched([second])["value"].to_pylist() == [b"c"]
        complaint(lambda: list(reader.read()), CorruptData, place)

    def test_a_missing_batch_is_named_with_its_offsets_and_what_to_do(self, place: PlainStore, log: ObjectLog) -> None:
        location = log.head().tail[0].location
        place.delete(location)
        message = complaint(lambda: list(open_log(place).read()), NotFound, place)
        assert f"{place.url}/{location}" in message
        assert "offsets 0 to 1" in message
        assert "restore" in message

    def test_another_batch_in_its_place_is_noticed(self, place: PlainStore, log: ObjectLog) -> None:
        append(log, b"d", number=2)
        _, first, second = (entry.location for entry in log.head().tail)
        assert len(place.get(first).data) == len(place.get(second).data)
        place.put(first, bytes(place.get(second).data))
        message = complaint(lambda: content(open_log(place)), CorruptData, place)
        assert first in message
        assert "another batch" in message

    def test_a_batch_of_a_newer_version_asks_for_an_upgrade(self, place: PlainStore, log: ObjectLog) -> None:
        location = log.head().tail[0].location
        spoil(place, location, lambda data: data[:-2] + struct.pack("<H", 3))
        message = complaint(lambda: content(open_log(place)), UnsupportedVersion, place)
        assert location in message
        assert "version 3" in message
        assert "upgrade" in message

    def test_a_damaged_batch_does_not_stop_the_writers(self, place: PlainStore, log: ObjectLog) -> None:
        spoil(place, log.head().tail[0].location, flipped)
        assert append(open_log(place), b"d", number=2).first == 3


class TestChunk:
    @damaged
    def test_a_damaged_chunk_is_named_and_what_is_not_in_it_is_still_read(
        self, place: PlainStore, spilled: ObjectLog, damage: Callable[[bytes], bytes]
    ) -> None:
        (chunk,) = paths(place, "chunks/")
        spoil(place, chunk, damage)
        reader = open_log(place)
        message = complaint(lambda: reader.plan(reader.start()), CorruptData, place)
        assert f"{place.url}/{chunk}" in message
        assert "Restore" in message
        assert content(reader, reader.start().at(110)) == [(n, b"%d" % n) for n in range(110, SPILLED)]

    def test_a_missing_chunk_is_named_with_its_offsets(self, place: PlainStore, spilled: ObjectLog) -> None:
        (chunk,) = paths(place, "chunks/")
        place.delete(chunk)
        reader = open_log(place)
        message = complaint(lambda: reader.plan(reader.start()), CorruptData, place)
        assert f"{place.url}/{chunk}" in message
        assert "offsets 0 to 63" in message
        assert "Restore" in message

    def test_writing_continues_without_a_chunk(self, place: PlainStore, spilled: ObjectLog) -> None:
        place.delete(paths(place, "chunks/")[0])
        assert append(open_log(place), b"x", number=SPILLED).first == SPILLED


class TestHead:
    @damaged
    def test_a_damaged_head_is_named_and_neither_read_nor_written(
        self, place: PlainStore, log: ObjectLog, damage: Callable[[bytes], bytes]
    ) -> None:
        spoil(place, "head", damage)
        for action in (
            lambda log: log.bounds(),
            lambda log: log.plan(log.start()),
            lambda log: log.slots.create("other", 0),
            lambda log: log.producer(),
            lambda log: log.slots.floor(),
        ):
            message = complaint(lambda action=action: action(open_log(place)), CorruptData, place)
            assert f"{place.url}/head" in message
            assert "Restore" in message

    def test_a_damaged_head_takes_no_appends(self, place: PlainStore, log: ObjectLog) -> None:
        spoil(place, "head", flipped)
        before = bytes(place.get("head").data)
        with pytest.raises(CorruptData, match="head"):
            append(open_log(place), b"d", number=2)
        assert bytes(place.get("head").data) == before

    def test_a_missing_head_is_damage_and_not_a_new_log(self, place: PlainStore, log: ObjectLog) -> None:
        place.delete("head")
        for action in (
            lambda: open_log(place).bounds(),
            lambda: open_log(place, create=True).bounds(),
            lambda: append(open_log(place), b"d", number=2),
            lambda: open_log(place).producer(),
            lambda: list(open_log(place).slots.list()),
        ):
            message = complaint(action, CorruptData, place)
            assert f"{place.url}/head is missing" in message
            assert "restore" in message

    def test_the_head_of_another_log_is_refused(self, place: PlainStore, log: ObjectLog) -> None:
        other = PlainStore()
        open_log(other, create=True)
        place.put("head", bytes(other.get("head").data))
        message = complaint(lambda: open_log(place).bounds(), CorruptData, place)
        assert str(log.log_id) in message

    def test_a_head_of_a_newer_version_asks_for_an_upgrade(self, place: PlainStore, log: ObjectLog) -> None:
        spoil(place, "head", lambda data: data[:4] + struct.pack("<H", 3) + data[6:])
        for action in (lambda: open_log(place).bounds(), lambda: append(open_log(place), b"d", number=2)):
            message = complaint(action, UnsupportedVersion, place)
            assert f"{place.url}/head" in message
            assert "version 3" in message
            assert "upgrade" in message


class TestIdentity:
    def test_an_empty_place_is_no_log_and_stays_empty(self, place: PlainStore) -> None:
        message = complaint(lambda: open_log(place), NotALog, place)
        assert place.url in message
        assert "open it with create" in message

    def test_a_folder_of_other_files_is_no_log(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        store = LocalStore(str(tmp_path))
        message = complaint(lambda: open_log(str(tmp_path)), NotALog, store)
        assert str(tmp_path) in message

    def test_a_folder_that_does_not_exist_is_no_log_and_is_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(NotALog, match="nowhere"):
            open_log(str(tmp_path / "nowhere"))
        assert list(tmp_path.iterdir()) == []

    @damaged
    def test_a_damaged_identity_is_named(
        self, place: PlainStore, log: ObjectLog, damage: Callable[[bytes], bytes]
    ) -> None:
        original = bytes(place.get("log.json").data)
        spoil(place, "log.json", damage)
        if damage is flipped:  # JSON has no checksum: take a bit that makes it wrong
            place.put("log.json", original.replace(b"log_id", b"log_ie"))
        for options in ({}, {"create": True}):
            message = complaint(lambda options=options: open_log(place, **options), CorruptData, place)
            assert f"{place.url}/log.json" in message

    @pytest.mark.parametrize("version", [3, 99])
    def test_a_log_that_needs_a_newer_reader_asks_for_an_upgrade(
        self, place: PlainStore, log: ObjectLog, version: int
    ) -> None:
        identity = json.loads(bytes(place.get("log.json").data))
        place.put("log.json", json.dumps({**identity, "version": version, "min_reader": version}).encode())
        for options in ({}, {"create": True}):
            message = complaint(lambda options=options: open_log(place, **options), UnsupportedVersion, place)
            assert f"{place.url}/log.json" in message
            assert f"version {version}" in message
            assert "upgrade" in message

    def test_a_newer_log_that_old_readers_can_read_is_read(self, place: PlainStore, log: ObjectLog) -> None:
        identity = json.loads(bytes(place.get("log.json").data))
        del identity["checksum"]
        place.put("log.json", json.dumps(with_checksum({**identity, "version": 2, "colour": "red"})).encode())
        assert open_log(place).bounds() == Bounds(0, 3)

    def test_something_else_than_an_object_log_is_named(self, place: PlainStore, log: ObjectLog) -> None:
        identity = json.loads(bytes(place.get("log.json").data))
        place.put("log.json", json.dumps({**identity, "kind": "strandline-wal"}).encode())
        assert "write-ahead log" in complaint(lambda: open_log(place), WrongKind, place)


class TestSlot:
    @damaged
    def test_a_damaged_slot_is_named_and_never_taken_for_none(
        self, place: PlainStore, log: ObjectLog, damage: Callable[[bytes], bytes]
    ) -> None:
        original = bytes(place.get("slots/billing.json").data)
        spoil(place, "slots/billing.json", damage)
        if damage is flipped:
            place.put("slots/billing.json", original.replace(b'"epoch": 0', b'"epoch": -1'))
        reader = open_log(place)
        for action in (
            reader.slots.list,
            reader.slots.floor,
            lambda: reader.slots.claim("billing", "h"),
            lambda: reader.slots.get("billing"),
        ):
            assert "slots/billing.json" in complaint(action, CorruptData, place)

    def test_a_missing_slot_is_damage_and_does_not_lift_the_floor(self, place: PlainStore, log: ObjectLog) -> None:
        place.delete("slots/billing.json")
        reader = open_log(place)
        for action in (reader.slots.list, reader.slots.floor):
            message = complaint(action, CorruptData, place)
            assert "slots/billing.json is missing" in message
            assert "restore" in message

    def test_a_slot_of_another_log_s_writer_is_unaffected(self, place: PlainStore, log: ObjectLog) -> None:
        place.put("slots/stranger.json", b"not ours")
        assert [state.name for state in log.slots.list()] == ["billing"]
        assert append(log, b"d", writer=writer_named(2), number=0).first == 3
