"""Published snapshots: the pointer never moves back, its snapshot is whole and stays, and one of many exports."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from strandline.errors import (
    AlreadyExists,
    Contended,
    CorruptData,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    NotReady,
    OutcomeUnknown,
    StorageError,
    TransientStorageError,
    UnsupportedVersion,
)
from strandline.formats.snapshot.manifest import PointerCodec
from strandline.model.snapshot import Artifact, Pointer, Superseded
from strandline.model.stamp import OpId, Stamped
from strandline.snapshots.artifacts import Artifacts, Publication
from strandline.snapshots.pointer import (
    StalePayload,
    abandoned,
    forget,
    generation_of,
    give_up,
    location_of,
    plan_sweep,
    point,
)
from strandline.snapshots.sealed import check_snapshot
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.followers.small_store import OTHER_LOG, DyingDisk, TinyStore, cursor, tiny
from tests.interleave import Interleaver

HOUR = 3600.0
SHA = "ab" * 32


def artifact(offset: int, generation: int = 1, *, log_id=None, term: int = 0, at: int = 100) -> Artifact:
    where = cursor(offset, term=term) if log_id is None else cursor(offset, log_id, term)
    return Artifact(location_of(generation, where, SHA), where, "tiny", 1, 10, 4, SHA, at)


class TestTheRules:
    def test_the_pointer_moves_to_what_is_newer_and_notes_what_it_left(self):
        first = point(Pointer(), artifact(5))
        second = point(first, artifact(9, 2, at=200))
        assert second.current == artifact(9, 2, at=200)
        assert second.superseded == (Superseded(artifact(5).location, 200),)
        assert [Pointer().generation, first.generation, second.generation] == [1, 2, 3]

    @pytest.mark.parametrize("offset", [0, 4, 5])
    def test_an_older_cursor_of_the_same_log_changes_nothing(self, offset):
        pointer = point(Pointer(), artifact(5))
        assert point(pointer, artifact(offset, 2)) is pointer
        assert point(pointer, artifact(offset, 2), replacing=True) is pointer

    def test_an_older_one_changes_nothing_even_if_its_payload_is_gone(self):
        pointer = give_up(point(Pointer(), artifact(5)), 7)
        assert point(pointer, artifact(4, 2)) is pointer

    def test_an_artifact_of_an_older_term_changes_nothing_at_any_offset(self):
        pointer = point(Pointer(), artifact(5, term=3))
        assert point(pointer, artifact(9, 2, term=2)) is pointer
        assert point(pointer, artifact(9, 2, term=4)).current == artifact(9, 2, term=4)

    def test_an_artifact_of_another_log_is_refused_unless_it_is_to_replace(self):
        pointer = point(Pointer(), artifact(5))
        with pytest.raises(Diverged, match="replace=True"):
            point(pointer, artifact(9, 2, log_id=OTHER_LOG))
        moved = point(pointer, artifact(1, 2, log_id=OTHER_LOG), replacing=True)
        assert moved.current == artifact(1, 2, log_id=OTHER_LOG)
        assert moved.superseded[0].location == artifact(5).location

    def test_an_artifact_of_any_offset_takes_the_place_of_one_that_is_lost_and_of_no_other(self):
        pointer = point(Pointer(), artifact(5))
        assert point(pointer, artifact(3, 2), lost=artifact(5).location).current == artifact(3, 2)
        newer = point(pointer, artifact(9, 2))
        assert point(newer, artifact(3, 3), lost=artifact(5).location) is newer

    def test_a_payload_that_was_given_up_cannot_be_pointed_at(self):
        pointer = give_up(Pointer(), 1)
        with pytest.raises(StalePayload):
            point(pointer, artifact(5, 1))
        assert point(pointer, artifact(5, pointer.generation)).current is not None

    def test_giving_up_never_lowers_the_minimum(self):
        pointer = give_up(Pointer(), 5)
        assert give_up(pointer, 3) is pointer
        assert (pointer.min_generation, pointer.generation) == (6, 6)

    def test_abandoned_is_what_is_not_listed_and_was_not_written_to_for_long(self):
        pointer = point(point(Pointer(), artifact(5)), artifact(9, 2))
        there = {artifact(5).location: 0, artifact(9, 2).location: 0, "payloads/strange": 0}
        assert abandoned(pointer, there, before=50) is None
        there |= {artifact(6, 1).location: 50, artifact(7, 2).location: 51}
        assert abandoned(pointer, there, before=50) == 1

    def test_the_payload_that_the_pointer_names_is_never_swept(self):
        pointer = give_up(point(point(Pointer(), artifact(5)), artifact(9, 2)), 9)
        there = [artifact(5).location, artifact(9, 2).location, artifact(6, 3).location, artifact(6, 10).location]
        assert plan_sweep(pointer, there, before=99).superseded == ()
        swept = plan_sweep(pointer, there, before=100)
        assert swept.superseded == (artifact(5).location,)
        assert swept.unlisted == (artifact(6, 3).location,), "generation 10 may yet be pointed at"
        twice = Pointer(current=artifact(5), superseded=(Superseded(artifact(5).location, 0),), min_generation=9)
        assert plan_sweep(twice, there[:1], before=10**9) == plan_sweep(Pointer(), [], before=0)

    def test_forgetting_what_was_deleted_leaves_the_rest(self):
        pointer = point(point(point(Pointer(), artifact(5)), artifact(9, 2)), artifact(12, 3))
        assert [gone.location for gone in forget(pointer, [artifact(5).location]).superseded] == [
            artifact(9, 2).location
        ]
        assert forget(pointer, ["payloads/x"]) is pointer

    def test_names_contain_cursor_and_hash_and_sort_by_generation(self):
        name = location_of(3, cursor(42, term=1), SHA)
        assert name == f"payloads/{3:016d}/{42:020d}-1-{UUID(int=7).hex}-{SHA}"
        assert generation_of(name) == 3
        assert generation_of(f"payloads/{3:016d}") is None
        assert generation_of("payloads/x/y") is None


STATE = Stamped(point(point(Pointer(), artifact(5)), artifact(9, 2)), 7, (OpId(UUID(int=9)),))


class TestTheBytes:
    @pytest.mark.parametrize("state", [STATE, Stamped(Pointer(), 1, ())])
    def test_a_pointer_survives_its_bytes(self, state):
        assert PointerCodec().decode(PointerCodec().encode(state), "x") == state

    def test_damage_is_an_error_that_names_the_object(self):
        dice, good = random.Random(5), PointerCodec().encode(STATE)
        refused = 0
        for _ in range(2000):
            bad = bytearray(good)
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(len(bad))
                bad[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
            try:
                PointerCodec().decode(bytes(bad), "the pointer")
            except (CorruptData, UnsupportedVersion) as error:
                refused += "the pointer" in str(error)
        assert refused > 1000

    @pytest.mark.parametrize("data", [b"", b"[]", b"null", b"7", b"{}", b"\xff", b"[" * 100_000, b'{"kind": 7}'])
    def test_bytes_that_are_no_pointer_are_damage(self, data):
        with pytest.raises(CorruptData):
            PointerCodec().decode(data, "x")

    def test_a_newer_version_asks_for_an_upgrade(self):
        with pytest.raises(UnsupportedVersion, match="upgrade strandline"):
            PointerCodec().decode(PointerCodec().encode(STATE).replace(b'"version": 1', b'"version": 2'), "x")

    def test_a_location_that_leads_elsewhere_is_damage(self):
        data = PointerCodec().encode(STATE).replace(b"payloads/0000000000000002/", b"payloads/../elsewhere/")
        with pytest.raises(CorruptData, match="payloads"):
            PointerCodec().decode(data, "x")


@pytest.fixture
def clock():
    return ManualClock()


def payloads(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(
        {"/".join(item.path.removeprefix(prefix).split("/")[:3]) for item in store.list(f"{prefix}payloads/")}
    )


class Place:
    """A store to publish to, and folders with snapshots at chosen cursors."""

    def __init__(self, store: ObjectStore, folder: Path, clock: ManualClock | None = None) -> None:
        self.store, self.folder, self.clock = store, folder, clock
        self.count = 0

    def artifacts(self, store: ObjectStore | None = None, *, grace: float = HOUR, **options) -> Artifacts:
        options |= {"env": Env(clock=self.clock)} if self.clock else {}
        return Artifacts(store or self.store, "snapshots", part=16, workers=2, grace=grace, **options)

    def sealed(self, offset: int, log_id=None, **pairs: str) -> str:
        self.count += 1
        store = tiny(str(self.folder / f"live-{self.count}"), offset, **(pairs or {"a": str(offset)}))
        if log_id is not None:
            store.set(store.state, cursor(offset, log_id))
        target = str(self.folder / f"sealed-{self.count}")
        store.export_to(target)
        return target

    def fetched(self, artifacts: Artifacts) -> TinyStore:
        self.count += 1
        target = str(self.folder / f"fetched-{self.count}")
        snapshot = artifacts.fetch(target)
        assert check_snapshot(target, shared=False) == snapshot
        return TinyStore.import_from(target, f"{target}-store")


@pytest.fixture
def place(tmp_path, clock):
    return Place(PlainStore(clock=clock), tmp_path, clock)


class PublishingContract:
    """The contract of publishing, on every store."""

    @pytest.fixture
    def there(self) -> Iterator[Place]:
        raise NotImplementedError

    def test_a_published_snapshot_is_fetched_as_the_same_sealed_folder(self, there):
        artifacts = there.artifacts()
        assert artifacts.newest() is None
        assert artifacts.publish(there.sealed(5, a="one", b="x" * 100)) == cursor(5)
        newest = artifacts.newest()
        assert (newest.cursor, newest.kind, newest.kind_version) == (cursor(5), "tiny", 1)
        store = there.fetched(there.artifacts())
        assert (store.at, list(store.range())) == (cursor(5), [(b"a", b"one"), (b"b", b"x" * 100)])

    def test_the_newest_wins_and_the_pointer_never_goes_back(self, there):
        artifacts, late = there.artifacts(), there.sealed(3)
        assert artifacts.publish(there.sealed(5)) == cursor(5)
        assert artifacts.publish(there.sealed(9)) == cursor(9)
        assert there.artifacts().publish(late) == cursor(9), "it is told what is published"
        assert there.fetched(artifacts).at == cursor(9)
        assert len(payloads(there.store, "snapshots/")) == 2, "nothing was uploaded for it"

    def test_a_snapshot_of_another_log_is_refused_unless_it_is_to_replace(self, there):
        artifacts = there.artifacts()
        artifacts.publish(there.sealed(5))
        other = there.sealed(2, OTHER_LOG)
        with pytest.raises(Diverged):
            artifacts.publish(other)
        assert there.fetched(artifacts).at == cursor(5)
        assert artifacts.publish(other, replace=True) == cursor(2, OTHER_LOG)
        assert there.fetched(artifacts).at == cursor(2, OTHER_LOG)

    def test_superseded_payloads_are_trimmed_and_the_newest_stays(self, there):
        artifacts = there.artifacts(grace=0)
        for offset in (5, 9, 12):
            artifacts.publish(there.sealed(offset))
        artifacts.trim()
        assert payloads(there.store, "snapshots/") == [artifacts.newest().location]
        assert there.fetched(artifacts).at == cursor(12)

    def test_an_empty_address_reports_that_nothing_is_published(self, there):
        with pytest.raises(NotFound, match="Nothing is published at"):
            there.artifacts().fetch(str(there.folder / "x"))
        assert not (there.folder / "x").exists()
        assert there.artifacts().trim() == []

    def test_one_of_many_exporters_does_the_work(self, there):
        stores = [tiny(str(there.folder / name), 7, a="1") for name in "abc"]
        outcomes = []
        for store in stores:
            artifacts = there.artifacts()
            outcomes.append(artifacts.export(store, artifacts.lease(store.folder), scratch=str(there.folder / "tmp")))
        assert outcomes == [Publication("published", cursor(7)), Publication("busy"), Publication("busy")]
        assert there.fetched(there.artifacts()).at == cursor(7)


class TestInADictionary(PublishingContract):
    @pytest.fixture
    def there(self, tmp_path):
        return Place(PlainStore(), tmp_path)


class TestInMemory(PublishingContract):
    @pytest.fixture
    def there(self, tmp_path):
        return Place(open_store(f"memory://artifacts-{tmp_path.name}-{tmp_path.parent.name}"), tmp_path)


class TestInAFolder(PublishingContract):
    @pytest.fixture
    def there(self, tmp_path):
        return Place(LocalStore(str(tmp_path / "bucket")), tmp_path)


class TestOnS3(PublishingContract):
    @pytest.fixture
    def there(self, tmp_path, s3_place):
        return Place(s3_place(), tmp_path)


class TestPublishing:
    def test_files_go_up_and_come_down_in_parts(self, place):
        artifacts = place.artifacts()
        artifacts.publish(place.sealed(5, a="x" * 100))
        sizes = [
            item.size for item in place.store.list("snapshots/payloads/") if not item.path.endswith("MANIFEST.json")
        ]
        assert len(sizes) > 10
        assert max(sizes) == 16
        other = Artifacts(place.store, "snapshots", part=1000, workers=1)
        assert place.fetched(other).get(b"a") == b"x" * 100, "its own part size does not matter"

    def test_an_empty_file_survives(self, place, tmp_path):
        from strandline.snapshots.sealed import seal
        from strandline.storage.disk import DISK

        seal(
            str(tmp_path / "s"),
            kind="k",
            kind_version=1,
            cursor=cursor(1),
            fill=lambda data: DISK.write_new(f"{data}/empty", []),
            verify=lambda _: cursor(1),
        )
        place.artifacts().publish(str(tmp_path / "s"))
        place.artifacts().fetch(str(tmp_path / "back"))
        assert (tmp_path / "back" / "data" / "empty").read_bytes() == b""

    def test_an_address_will_do_for_a_store(self, place, tmp_path):
        artifacts = Artifacts(f"file://{tmp_path}/bucket")
        artifacts.publish(place.sealed(5))
        assert (tmp_path / "bucket" / "pointer.json").exists()
        with pytest.raises(InvalidInput):
            Artifacts(place.store, part=0)

    def test_an_altered_file_is_not_published(self, place):
        folder = Path(place.sealed(5))
        note = (folder / "data" / "NOTE").read_bytes()
        for content in (b"a SECond file", note + b"more", note[:-1]):
            (folder / "data" / "NOTE").write_bytes(content)
            with pytest.raises(CorruptData, match="data/NOTE was altered"):
                place.artifacts().publish(str(folder))
            assert place.artifacts().newest() is None

    def test_publishing_the_same_folder_again_changes_nothing(self, place):
        folder, artifacts = place.sealed(5), place.artifacts()
        artifacts.publish(folder)
        before = {item.path: bytes(place.store.get(item.path).data) for item in place.store.list("")}
        assert artifacts.publish(folder) == cursor(5)
        assert {item.path: bytes(place.store.get(item.path).data) for item in place.store.list("")} == before

    def test_a_lost_answer_to_the_pointers_move_is_found_out(self, place):
        line = FaultyStore(place.store)
        artifacts = place.artifacts(line)
        artifacts.publish(place.sealed(5))
        line.lose_answers(1, path_prefix="snapshots/pointer")
        assert artifacts.publish(place.sealed(9)) == cursor(9)
        assert len(artifacts._pointer().superseded) == 1

    def test_a_guard_that_refuses_keeps_the_pointer_where_it_is(self, place):
        def guard():
            raise Fenced("lost")

        with pytest.raises(Fenced):
            place.artifacts().publish(place.sealed(5), guard=guard)
        assert place.artifacts().newest() is None

    def test_a_trim_that_fails_does_not_fail_the_publishing(self, place, caplog):
        line = FaultyStore(place.store)
        line.fail_next("list", times=1)
        with caplog.at_level(logging.WARNING):
            assert place.artifacts(line).publish(place.sealed(5)) == cursor(5)
        assert "stay for now" in caplog.text

    @pytest.mark.usefixtures("unsynced")
    @pytest.mark.parametrize("after", [False, True])
    def test_a_death_at_any_operation_leaves_the_old_snapshot_or_the_new_one_whole(self, place, tmp_path, after):
        first, second, third = place.sealed(5), place.sealed(9), place.sealed(12)
        number = 0
        while True:
            store = PlainStore(clock=place.clock)
            calm = Artifacts(store, part=64, workers=1, grace=0, env=Env(clock=place.clock))
            calm.publish(first)
            line = FaultyStore(store)
            line.crash_at(number, after=after)
            try:
                Artifacts(line, part=64, workers=1, grace=0, env=Env(clock=place.clock)).publish(second)
            except Crash:
                at = place.fetched(calm).at
                assert at in (cursor(5), cursor(9))
            else:
                break
            calm.publish(third)
            place.clock.advance(1)
            calm.trim()
            assert payloads(store) == [calm.newest().location], f"a death at operation {number} left something"
            assert place.fetched(calm).at == cursor(12)
            number += 1
        assert number > 8

    def test_a_failing_disk_at_any_operation_publishes_nothing_or_all(self, place):
        folder = place.sealed(5)
        number = 0
        while True:
            store, disk = PlainStore(), DyingDisk(number)
            try:
                Artifacts(store, part=64, env=Env(disk=disk)).publish(folder)
            except StorageError:
                assert Artifacts(store).newest() is None
                number += 1
            else:
                break
        assert number > 4


class TestTrimming:
    def test_a_superseded_payload_stays_for_the_grace_period(self, place, clock):
        artifacts = place.artifacts()
        artifacts.publish(place.sealed(5))
        old = artifacts.newest().location
        clock.advance(10 * HOUR)
        artifacts.publish(place.sealed(9))
        clock.advance(HOUR - 1)
        assert artifacts.trim() == []
        clock.advance(1)
        assert artifacts.trim() == [old]
        assert artifacts._pointer().superseded == ()
        assert artifacts.trim() == []

    def test_the_payload_that_the_pointer_names_is_never_trimmed_however_old_it_is(self, place, clock):
        artifacts = place.artifacts(grace=0)
        artifacts.publish(place.sealed(5))
        clock.advance(1000 * HOUR)
        assert artifacts.trim() == []
        assert place.fetched(artifacts).at == cursor(5)

    def unfinished(self, place, offset: int, at: int) -> None:
        """An exporter that crashes after ``parts`` parts."""
        line = FaultyStore(place.store)
        seen = []

        def hook(call):
            if call.name == "put" and call.stage == "before":
                seen.append(call.path)
                if len(seen) > at:
                    raise Crash("here")

        line.hook(hook)
        with pytest.raises(Crash):
            place.artifacts(line).publish(place.sealed(offset))

    def test_payloads_of_a_dead_exporter_are_deleted_after_the_grace_period(self, place, clock):
        artifacts = place.artifacts()
        artifacts.publish(place.sealed(5))
        self.unfinished(place, 9, at=3)
        assert len(payloads(place.store, "snapshots/")) == 2
        clock.advance(HOUR - 1)
        assert artifacts.trim() == []
        clock.advance(1)
        assert len(artifacts.trim()) == 1
        assert payloads(place.store, "snapshots/") == [artifacts.newest().location]

    def test_what_was_left_before_anything_was_published_goes_too(self, place, clock):
        self.unfinished(place, 9, at=3)
        clock.advance(HOUR)
        assert len(place.artifacts().trim()) == 1
        assert payloads(place.store, "snapshots/") == []
        assert place.artifacts().publish(place.sealed(5)) == cursor(5)

    def test_objects_of_others_are_left_alone(self, place, clock):
        place.store.put("snapshots/payloads/readme.txt", b"x")
        place.store.put("snapshots/payloads/0000000000000001/UPPER/x", b"x")
        place.store.put("payloads/0000000000000001/x/y", b"x")
        place.artifacts(grace=0).publish(place.sealed(5))
        clock.advance(HOUR)
        assert place.artifacts(grace=0).trim() == []

    def slowly(self, place, clock, folder: str, meanwhile, *, at: str) -> tuple:
        """Publish, and let something happen once, before the first operation whose path holds ``at``."""
        line = FaultyStore(place.store)
        done = []

        def hook(call):
            if call.stage == "before" and call.name in ("put", "put_if") and at in call.path and not done:
                done.append(1)
                meanwhile()

        artifacts = place.artifacts(line)
        artifacts._ensure_pointer()
        line.hook(hook)
        return artifacts.publish(folder), line

    def test_a_slow_exporter_whose_payload_was_trimmed_notices_and_uploads_again(self, place, clock):
        def trim():
            clock.advance(2 * HOUR)
            assert len(place.artifacts().trim()) == 1

        published, line = self.slowly(place, clock, place.sealed(5), trim, at="pointer")
        assert published == cursor(5)
        assert len({row.path.split("/")[2] for row in line.named("put")}) == 2, "two generations"
        clock.advance(2 * HOUR)
        place.artifacts().trim()
        assert place.fetched(place.artifacts()).at == cursor(5)
        assert len(payloads(place.store, "snapshots/")) == 1

    def test_an_exporter_that_is_slow_and_writes_on_is_not_given_up(self, place, clock):
        slow = FaultyStore(place.store)

        def hook(call):
            if call.name == "put" and call.stage == "before":
                clock.advance(HOUR / 2)
                place.artifacts().trim()

        slow.hook(hook)
        artifacts = Artifacts(slow, "snapshots", part=16, workers=1, env=Env(clock=clock))
        assert artifacts.publish(place.sealed(5, a="x" * 100)) == cursor(5)
        assert len({row.path.split("/")[2] for row in slow.named("put")}) == 1, "one generation"

    def test_an_exporter_that_is_given_up_each_time_raises(self, place, clock):
        slow = FaultyStore(place.store)

        def hook(call):
            if call.name == "put_if" and call.stage == "before" and len(slow.named("put")):
                clock.advance(2 * HOUR)
                place.artifacts().trim()

        slow.hook(hook)
        with pytest.raises(StorageError, match="was given up by trims 5 times"):
            place.artifacts(slow).publish(place.sealed(5))

    @pytest.mark.usefixtures("unsynced")
    def test_a_death_within_a_trim_at_any_operation_is_repaired_by_the_next(self, place, clock):
        snapshots = [place.sealed(offset) for offset in (5, 9, 12)]
        for after in (False, True):
            number = 0
            while True:
                store = PlainStore(clock=clock)
                calm = Artifacts(store, part=64, workers=1, env=Env(clock=clock))
                for folder in snapshots:
                    calm.publish(folder)
                store.put(f"payloads/{1:016d}/orphan/00000000-00000000", b"x")
                clock.advance(HOUR)
                line = FaultyStore(store)
                line.crash_at(number, after=after)
                try:
                    Artifacts(line, part=64, workers=1, env=Env(clock=clock)).trim()
                except Crash:
                    number += 1
                else:
                    break
                assert place.fetched(calm).at == cursor(12)
                calm.trim()
                assert payloads(store) == [calm.newest().location]
                assert calm._pointer().superseded == ()
            assert number > 10


class TestFetching:
    def test_a_fetcher_whose_payload_is_trimmed_reads_the_pointer_again(self, place, clock):
        artifacts = place.artifacts(grace=0)
        artifacts.publish(place.sealed(5))
        newer = place.sealed(9)
        line = FaultyStore(place.store)
        parts = []

        def hook(call):
            if call.stage == "before" and call.path.endswith("-00000001"):
                parts.append(1)
                if len(parts) == 1:
                    artifacts.publish(newer)
                    clock.advance(1)
                    artifacts.trim()

        line.hook(hook)
        assert place.fetched(place.artifacts(line)).at == cursor(9)

    def test_a_missing_part_of_what_the_pointer_names_is_damage(self, place, tmp_path):
        artifacts = place.artifacts()
        artifacts.publish(place.sealed(5))
        place.store.delete(f"snapshots/{artifacts.newest().location}/00000000-00000000")
        with pytest.raises(CorruptData, match=r"00000000-00000000\. The pointer names it"):
            artifacts.fetch(str(tmp_path / "x"))
        assert not (tmp_path / "x").exists()

    @pytest.mark.parametrize("name", ["00000000-00000000", "00000001-00000002", "MANIFEST.json"])
    @pytest.mark.parametrize("change", ["flip", "cut", "empty", "longer"])
    def test_an_altered_object_is_refused_and_leaves_nothing(self, place, tmp_path, name, change):
        artifacts = place.artifacts()
        artifacts.publish(place.sealed(5))
        path = f"snapshots/{artifacts.newest().location}/{name}"
        data = bytes(place.store.get(path).data)
        changed = {"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "empty": b"", "longer": data + b"x"}
        place.store.put(path, changed[change])
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CorruptData, match="match its hash"):
            artifacts.fetch(str(tmp_path / "x"))
        assert sorted(tmp_path.iterdir()) == before

    def test_an_occupied_destination_is_refused(self, place, tmp_path):
        artifacts = place.artifacts()
        artifacts.publish(place.sealed(5))
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "mine").write_text("here")
        with pytest.raises(AlreadyExists):
            artifacts.fetch(str(tmp_path / "x"))
        assert [path.name for path in (tmp_path / "x").iterdir()] == ["mine"]

    @pytest.mark.usefixtures("unsynced")
    @pytest.mark.parametrize("dies", [False, True])
    def test_a_failing_disk_at_any_operation_leaves_the_destination_as_it_was_or_whole(self, place, tmp_path, dies):
        place.artifacts().publish(place.sealed(5))
        number = 0
        while True:
            dest = tmp_path / f"x{number}" / "dest"
            disk = DyingDisk(number, dies=dies)
            try:
                Artifacts(place.store, "snapshots", workers=1, env=Env(disk=disk)).fetch(str(dest))
            except (StorageError, Crash):
                if dest.exists():
                    assert dies
                    assert check_snapshot(str(dest)).cursor == cursor(5)
                    dest.rename(dest.parent / "earlier")
                place.artifacts().fetch(str(dest))
                assert {path.name for path in dest.parent.iterdir()} <= {"dest", "earlier"}
                number += 1
            else:
                break
        assert number > 15

    def test_a_store_that_fails_while_fetching_leaves_nothing(self, place, tmp_path):
        place.artifacts().publish(place.sealed(5))
        line = FaultyStore(place.store)
        line.fail_next("get", path_prefix="snapshots/payloads", times=1)
        with pytest.raises(TransientStorageError):
            place.artifacts(line).fetch(str(tmp_path / "x"))
        assert not (tmp_path / "x").exists()


class TestExporting:
    @pytest.fixture
    def scratch(self, tmp_path):
        return str(tmp_path / "scratch")

    def lease(self, place, name: str, clock=None, store=None):
        artifacts = Artifacts(store or place.store, "snapshots", env=Env(clock=clock or ManualClock(auto=False)))
        return artifacts.lease(name, seconds=60)

    def test_an_export_publishes_the_store_and_leaves_no_scratch(self, place, scratch):
        store = tiny(str(place.folder / "live"), 7, a="1")
        assert place.artifacts().export(store, scratch=scratch) == Publication("published", cursor(7))
        assert list(Path(scratch).iterdir()) == []
        assert place.fetched(place.artifacts()).get(b"a") == b"1"

    def test_it_is_skipped_if_as_much_is_published(self, place, scratch):
        store = tiny(str(place.folder / "live"), 7)
        place.artifacts().publish(place.sealed(7))
        store.export_to = None  # would raise
        assert place.artifacts().export(store, scratch=scratch) == Publication("current", cursor(7))
        store.set({}, cursor(6))
        assert place.artifacts().export(store, scratch=scratch) == Publication("current", cursor(7))

    def test_it_is_skipped_if_something_was_published_lately(self, place, scratch, clock):
        store = tiny(str(place.folder / "live"), 7)
        place.artifacts().publish(place.sealed(5))
        clock.advance(59)
        assert place.artifacts().export(store, scratch=scratch, pause=60) == Publication("current", cursor(5))
        clock.advance(1)
        assert place.artifacts().export(store, scratch=scratch, pause=60) == Publication("published", cursor(7))

    def test_a_store_without_cursor_has_nothing_to_publish(self, place, scratch):
        with pytest.raises(NotReady):
            place.artifacts().export(TinyStore(str(place.folder / "new")), scratch=scratch)

    def test_a_store_of_another_log_is_refused_unless_it_is_to_replace(self, place, scratch):
        place.artifacts().publish(place.sealed(5))
        store = TinyStore(str(place.folder / "live"))
        store.set({}, cursor(2, OTHER_LOG))
        with pytest.raises(Diverged):
            place.artifacts().export(store, scratch=scratch)
        assert place.artifacts().export(store, scratch=scratch, replace=True).cursor == cursor(2, OTHER_LOG)

    def test_only_the_holder_of_the_lease_does_the_work(self, place, scratch):
        store = tiny(str(place.folder / "live"), 7)
        one, two = self.lease(place, "one"), self.lease(place, "two")
        assert one.try_acquire()
        assert place.artifacts().export(store, two, scratch=scratch) == Publication("busy")
        assert place.artifacts().newest() is None
        assert place.artifacts().export(store, one, scratch=scratch).outcome == "published"
        assert one.held()

    def test_an_exporter_that_lost_its_lease_does_not_move_the_pointer(self, place, scratch):
        mine, other = ManualClock(auto=False), ManualClock()
        store = tiny(str(place.folder / "live"), 7)
        one, two = self.lease(place, "one", mine), self.lease(place, "two", other)

        def meddle(folder: str, seal=store.export_to):
            assert not two.try_acquire()
            other.advance(60)
            assert two.try_acquire()
            mine.suspend(60)
            return seal(folder)

        store.export_to = meddle
        with pytest.raises(Fenced):
            place.artifacts().export(store, one, scratch=scratch)
        assert place.artifacts().newest() is None
        assert two.held()
        assert list(Path(scratch).iterdir()) == []

    def test_an_exporter_that_fails_releases_the_lease_at_once(self, place, scratch):
        store = tiny(str(place.folder / "live"), 7)
        one, two = self.lease(place, "one"), self.lease(place, "two")

        def fail(folder: str):
            raise StorageError("no room")

        store.export_to = fail
        with pytest.raises(StorageError, match="no room"):
            place.artifacts().export(store, one, scratch=scratch)
        assert two.try_acquire()

    def test_scratch_folders_of_a_dead_exporter_are_swept(self, place, scratch):
        store = tiny(str(place.folder / "live"), 7)
        store.disk = disk = DyingDisk(20, dies=True)
        with pytest.raises(Crash):
            Artifacts(place.store, env=Env(disk=disk)).export(store, scratch=scratch)
        assert list(Path(scratch).iterdir())
        place.artifacts().export(tiny(str(place.folder / "other"), 7), scratch=scratch)
        assert list(Path(scratch).iterdir()) == []


class TestRaces:
    def play(self, seed: int, tmp: Path, snapshots: list[str], kind: type[Artifacts] = Artifacts) -> None:
        """Exporters that race the pointer and die, trims beside them; the pointer is watched at each operation."""
        dice = random.Random(seed)
        order, clock, store = Interleaver(dice.getrandbits(64)), ManualClock(), PlainStore()
        store._clock = clock
        seen = [-1]

        def check() -> None:
            newest = Artifacts(store).newest()
            if newest is not None:
                assert newest.cursor.next >= seen[0], f"seed {seed}: the pointer went back"
                seen[0] = newest.cursor.next
                names = {item.path for item in store.list(newest.location)}
                assert f"{newest.location}/MANIFEST.json" in names, f"seed {seed}: the pointer names what is trimmed"
                assert len(names) == 1 + parts[newest.cursor.next], f"seed {seed}: the pointer names what is trimmed"

        def task(folder: str | None, mine: random.Random):
            line = FaultyStore(store)

            def hook(call):
                order.point()
                check()
                if mine.random() < 0.2:
                    clock.advance(mine.random() * HOUR)
                if mine.random() < 0.01:
                    raise Crash("here")

            line.hook(hook)
            ids = SeededChance(mine.getrandbits(64))
            artifacts = kind(line, part=64, grace=HOUR, env=Env(clock=clock, chance=ids))
            artifacts._workers = 0

            def work() -> None:
                for _ in range(1 if folder else 4):
                    with contextlib.suppress(Crash, OutcomeUnknown, Contended):
                        artifacts.publish(folder) if folder else artifacts.trim()

            return work

        parts = {}
        for folder in snapshots:
            snapshot = check_snapshot(folder)
            parts[snapshot.cursor.next] = sum(-(-file.size // 64) for file in snapshot.files)
        chosen = dice.sample(snapshots, 3)
        order.run([task(folder, random.Random(dice.getrandbits(64))) for folder in [*chosen, None]])
        check()

    @pytest.fixture
    def snapshots(self, place):
        return [place.sealed(offset) for offset in (5, 9, 12, 20)]

    @pytest.fixture(autouse=True)
    def in_one_thread(self, monkeypatch):
        """Let the tasks do their own transfers: the interleaver controls no other threads."""
        from strandline.snapshots import artifacts

        monkeypatch.setattr(artifacts, "_ahead", lambda work, items, _: (work(item) for item in items))

    @pytest.mark.matrix
    def test_the_pointer_never_goes_back_and_names_only_what_is_whole(self, snapshots, tmp_path):
        for seed in range(60):
            self.play(seed, tmp_path, snapshots)

    def test_a_last_writer_wins_pointer_is_caught(self, snapshots, tmp_path, monkeypatch):
        from dataclasses import replace

        from strandline.snapshots import artifacts

        def always(pointer, artifact, *, replacing=False, lost=None):
            return replace(pointer, current=artifact)

        monkeypatch.setattr(artifacts, "point", always)
        with pytest.raises(AssertionError, match=r"went back|names what is trimmed"):
            self.play_many(range(300), tmp_path, snapshots)

    def test_a_trim_that_does_not_give_up_first_is_caught(self, snapshots, tmp_path, monkeypatch):
        from strandline.snapshots import artifacts, pointer

        def by_age(state, there, *, before):
            listed = {gone.location for gone in state.superseded} | (
                {state.current.location} if state.current else set()
            )
            return pointer.SnapshotSweep((), tuple(location for location in there if location not in listed))

        monkeypatch.setattr(artifacts, "give_up", lambda state, _: state)
        monkeypatch.setattr(artifacts, "plan_sweep", by_age)
        with pytest.raises(AssertionError, match="names what is trimmed"):
            self.play_many(range(300), tmp_path, snapshots)

    def play_many(self, seeds, tmp_path, snapshots):
        for seed in seeds:
            self.play(seed, tmp_path, snapshots)


def test_many_threads_publish_and_fetch_at_once(tmp_path):
    place = Place(PlainStore(), tmp_path)
    folders = [place.sealed(offset) for offset in range(1, 9)]
    threads = [
        threading.Thread(target=Artifacts(place.store, "snapshots", part=16).publish, args=(folder,))
        for folder in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.fetched(place.artifacts()).at == cursor(8)
