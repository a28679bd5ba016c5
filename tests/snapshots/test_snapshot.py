"""Snapshots are complete or absent, and an import verifies everything."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from strandline.errors import AlreadyExists, CorruptData, InvalidInput, NotFound, StorageError, UnsupportedVersion
from strandline.snapshots.sealed import (
    check_snapshot,
    newest_snapshot,
    next_number,
    read_snapshot,
    seal,
    snapshot_folder,
    trim,
    unpack,
)
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash
from tests.disk_doubles import RecordingDisk
from tests.followers.small_store import LOG, DyingDisk, TinyStore, cursor, tiny


@pytest.fixture
def store(tmp_path):
    return tiny(str(tmp_path / "live"), 5, a="1", b="2")


@pytest.fixture
def sealed(store, tmp_path):
    store.export_to(str(tmp_path / "snap"))
    return tmp_path / "snap"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden names too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def rewrite(sealed: Path, **changes) -> None:
    fields = json.loads((sealed / "MANIFEST.json").read_text())
    fields.update(changes)
    (sealed / "MANIFEST.json").write_text(json.dumps(fields))


def refused(sealed: Path, error: type[Exception], match: str) -> None:
    """The import is refused with this error and leaves no file, whether the destination was absent or empty."""
    dest = sealed.parent / "dest"
    for _ in range(2):
        before = tree(sealed.parent)
        with pytest.raises(error, match=match):
            TinyStore.import_from(str(sealed), str(dest))
        assert tree(sealed.parent) == before
        dest.mkdir(exist_ok=True)


class TestSealing:
    def test_a_sealed_snapshot_lists_its_content_with_size_and_hash_of_every_file(self, store, tmp_path):
        clock = ManualClock()
        snapshot = store.export_to(str(tmp_path / "snap"), env=Env(clock=clock))
        assert snapshot == read_snapshot(str(tmp_path / "snap")) == check_snapshot(str(tmp_path / "snap"))
        assert (snapshot.kind, snapshot.kind_version, snapshot.cursor) == ("tiny", 1, cursor(5))
        assert snapshot.created == clock.now()
        for file in snapshot.files:
            data = (tmp_path / "snap" / "data" / file.path).read_bytes()
            assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert [file.path for file in snapshot.files] == ["NOTE", "state/all.json"]
        assert {path.name for path in tmp_path.iterdir()} == {"live", "snap"}, "nothing hidden stays behind"

    def test_an_occupied_destination_is_refused_and_left_unchanged(self, store, tmp_path):
        (tmp_path / "snap").mkdir()
        (tmp_path / "snap" / "mine").write_text("here")
        (tmp_path / "file").write_text("here")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        before = tree(tmp_path)
        for name in ("snap", "file", "link"):
            with pytest.raises(AlreadyExists, match=f"{name} is occupied"):
                store.export_to(str(tmp_path / name))
        assert tree(tmp_path) == before

    def test_an_empty_destination_and_missing_parents_are_fine(self, store, tmp_path):
        (tmp_path / "empty").mkdir()
        store.export_to(str(tmp_path / "empty"))
        store.export_to(str(tmp_path / "far" / "away"))
        assert check_snapshot(str(tmp_path / "empty")).files == check_snapshot(str(tmp_path / "far" / "away")).files

    def test_a_relative_folder_is_fine(self, store, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        store.export_to("snap")
        assert TinyStore.import_from("snap", "dest").get(b"a") == b"1"

    def test_files_of_many_strokes_are_hashed_whole(self, tmp_path):
        content = os.urandom(1 << 20) * 3 + b"rest"
        snapshot = seal(
            str(tmp_path / "snap"),
            kind="blob",
            kind_version=1,
            cursor=cursor(0),
            fill=lambda data: DISK.write_new(f"{data}/blob", [content]),
            verify=lambda _: cursor(0),
        )
        assert snapshot.files[0].sha256 == hashlib.sha256(content).hexdigest()

    def test_the_manifest_is_written_when_all_data_is_durable_and_the_rename_comes_last(self, store, tmp_path):
        disk = RecordingDisk()
        store.export_to(str(tmp_path / "snap"), env=Env(disk=disk))
        events = [(event.action, event.path.replace(str(tmp_path), "")) for event in disk.events]
        at = {event: number for number, event in enumerate(events)}
        manifest = next(number for number, event in enumerate(events) if event[1].endswith("MANIFEST.json"))
        rename = at["rename", "/snap"]
        synced = [number for number, event in enumerate(events) if event[0] == "sync_file"]
        assert len(synced) == 2
        assert max(synced) < manifest < rename
        folders = [event[1].split("~")[-1].partition("/")[2] for event in events[manifest:rename]]
        assert {"", "data", "data/state"} <= set(folders), "every folder is synced before the rename"
        assert events[rename + 1] == ("sync_folder", "")

    def test_a_failing_fill_leaves_nothing(self, tmp_path):
        def fill(data: str) -> None:
            Path(data, "half").write_text("x")
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError):
            seal(str(tmp_path / "s"), kind="k", kind_version=1, cursor=cursor(0), fill=fill, verify=TinyStore.held)
        assert tree(tmp_path) == {}

    def test_data_that_holds_another_cursor_is_not_sealed(self, tmp_path):
        with pytest.raises(CorruptData, match=r"holds the cursor .*/6 instead of .*/5"):
            seal(
                str(tmp_path / "s"),
                kind="tiny",
                kind_version=1,
                cursor=cursor(5),
                fill=lambda data: TinyStore.write(data, {}, cursor(6), DISK),
                verify=TinyStore.held,
            )
        assert tree(tmp_path) == {}

    def test_data_that_cannot_be_opened_is_not_sealed(self, tmp_path):
        with pytest.raises(CorruptData, match="holds nothing"):
            seal(
                str(tmp_path / "s"),
                kind="tiny",
                kind_version=1,
                cursor=cursor(5),
                fill=lambda _: None,
                verify=TinyStore.held,
            )
        assert tree(tmp_path) == {}

    @pytest.mark.parametrize("meddle", ["add", "remove", "alter"])
    def test_a_verification_that_changes_files_is_refused(self, meddle, tmp_path):
        def verify(data: str):
            if meddle == "add":
                Path(data, "LOCK").touch()
            elif meddle == "remove":
                Path(data, "NOTE").unlink()
            else:
                Path(data, "NOTE").write_bytes(b"another length")
            return cursor(5)

        with pytest.raises(InvalidInput, match="read-only"):
            seal(
                str(tmp_path / "s"),
                kind="tiny",
                kind_version=1,
                cursor=cursor(5),
                fill=lambda data: TinyStore.write(data, {}, cursor(5), DISK),
                verify=verify,
            )
        assert tree(tmp_path) == {}

    def test_data_with_links_in_it_is_not_sealed(self, tmp_path):
        with pytest.raises(CorruptData, match="is a link"):
            seal(
                str(tmp_path / "s"),
                kind="tiny",
                kind_version=1,
                cursor=cursor(5),
                fill=lambda data: Path(data, "l").symlink_to("/etc/hostname"),
                verify=lambda _: cursor(5),
            )

    @pytest.mark.usefixtures("unsynced")
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("dies", [False, True])
    def test_a_failure_or_a_death_at_any_operation_leaves_no_snapshot_or_a_whole_one(
        self, store, tmp_path, dies, after
    ):
        calm = DyingDisk()
        store.export_to(str(tmp_path / "calm" / "snap"), env=Env(disk=calm))
        for number in range(len(calm.done)):
            place = tmp_path / f"{dies}{after}{number}"
            place.mkdir()
            disk = DyingDisk(number, dies=dies, after=after)
            try:
                store.export_to(str(place / "snap"), env=Env(disk=disk))
            except (Crash, StorageError):
                if not dies and (place / "snap").exists():
                    pytest.fail(f"a failure at {disk.done[number]} left a snapshot: {tree(place)}")
            if (place / "snap").exists():
                check_snapshot(str(place / "snap"))
                (place / "snap").rename(place / "earlier")
            store.export_to(str(place / "snap"))
            assert check_snapshot(str(place / "snap")).cursor == cursor(5)
            left = {path.name for path in place.iterdir()} - {"snap", "earlier"}
            assert not left, f"{disk.done[number]} left {left}"


class TestLeftovers:
    def test_an_unfinished_folder_of_a_living_process_is_left_alone(self, store, tmp_path):
        def fill(data: str) -> None:
            TinyStore.write(data, {}, cursor(9), DISK)
            store.export_to(str(tmp_path / "other"))  # sweeps beside us
            assert Path(data, "NOTE").exists()

        seal(str(tmp_path / "snap"), kind="tiny", kind_version=1, cursor=cursor(9), fill=fill, verify=TinyStore.held)
        assert check_snapshot(str(tmp_path / "snap")).cursor == cursor(9)
        assert check_snapshot(str(tmp_path / "other")).cursor == cursor(5)

    def test_of_two_seals_of_one_folder_the_first_stays_and_the_second_fails(self, store, tmp_path):
        def fill(data: str) -> None:
            store.export_to(str(tmp_path / "snap"))
            TinyStore.write(data, {}, cursor(9), DISK)

        with pytest.raises(AlreadyExists):
            seal(
                str(tmp_path / "snap"), kind="tiny", kind_version=1, cursor=cursor(9), fill=fill, verify=TinyStore.held
            )
        assert check_snapshot(str(tmp_path / "snap")).cursor == cursor(5)
        assert {path.name for path in tmp_path.iterdir()} == {"live", "snap"}

    def test_names_of_others_are_never_swept(self, store, tmp_path):
        (tmp_path / ".snap.~staging-mine").mkdir()
        (tmp_path / ".hidden").mkdir()
        store.export_to(str(tmp_path / "snap"))
        assert {path.name for path in tmp_path.iterdir()} == {".hidden", ".snap.~staging-mine", "live", "snap"}


class TestImporting:
    def test_an_import_gives_the_same_content_at_the_same_cursor(self, store, sealed, tmp_path):
        (tmp_path / "empty").mkdir()
        for name in ("absent", "empty"):
            copy = TinyStore.import_from(str(sealed), str(tmp_path / name))
            assert list(copy.range()) == list(store.range()) == [(b"a", b"1"), (b"b", b"2")]
            assert copy.at == store.at
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_an_unknown_kind_is_refused(self, sealed):
        rewrite(sealed, kind="huge")
        refused(sealed, InvalidInput, "is of kind 'huge' and cannot be imported as 'tiny'")

    @pytest.mark.parametrize("version", [0, 2])
    def test_an_unknown_version_of_the_kind_is_refused(self, sealed, version):
        rewrite(sealed, kind_version=version)
        refused(sealed, UnsupportedVersion, f"is of version {version} of 'tiny'")

    def test_an_unknown_version_of_the_manifest_is_refused(self, sealed):
        rewrite(sealed, schema=2)
        refused(sealed, UnsupportedVersion, "version 2, and this program reads version 1: upgrade")

    def test_a_folder_without_manifest_is_no_snapshot(self, sealed):
        (sealed / "MANIFEST.json").unlink()
        refused(sealed, NotFound, "There is no snapshot at")

    def test_a_missing_file_is_refused(self, sealed):
        (sealed / "data" / "NOTE").unlink()
        refused(sealed, CorruptData, "data/NOTE is missing")

    def test_missing_data_is_refused(self, sealed):
        (sealed / "data").rename(sealed.parent / "elsewhere")
        refused(sealed, CorruptData, "it has no data")

    @pytest.mark.parametrize("where", ["data/extra", "data/state/extra", "extra"])
    def test_an_extra_file_is_refused(self, sealed, where):
        (sealed / where).write_text("x")
        refused(sealed, CorruptData, f"{where} is not in the manifest")

    def test_an_altered_file_of_the_same_size_is_refused(self, sealed):
        data = bytearray((sealed / "data" / "NOTE").read_bytes())
        data[3] ^= 1
        (sealed / "data" / "NOTE").write_bytes(data)
        refused(sealed, CorruptData, "data/NOTE was altered")

    def test_an_altered_file_of_another_size_is_refused(self, sealed):
        (sealed / "data" / "NOTE").write_bytes(b"")
        refused(sealed, CorruptData, "data/NOTE has 0 bytes and should have 13")

    @pytest.mark.parametrize("name", ["data/NOTE", "data/state", "data", "MANIFEST.json"])
    def test_a_link_is_refused_even_if_it_leads_to_the_same_bytes(self, sealed, name):
        (sealed / name).rename(sealed.parent / "moved")
        (sealed / name).symlink_to(sealed.parent / "moved")
        refused(sealed, CorruptData, f"{name} is a link")

    def test_an_extra_link_that_leads_nowhere_is_refused(self, sealed):
        (sealed / "data" / "lost").symlink_to("/nowhere/at/all")
        refused(sealed, CorruptData, "data/lost is a link")

    def test_a_file_with_a_second_name_is_refused_unless_the_kind_shares_its_files(self, sealed, tmp_path):
        os.link(sealed / "data" / "NOTE", tmp_path / "second")
        refused(sealed, CorruptData, r"data/NOTE has a second hard link")
        with pytest.raises(CorruptData, match="second hard link"):
            check_snapshot(str(sealed), shared=False)
        (tmp_path / "dest").rmdir()
        assert TinyStore.import_from(str(sealed), str(tmp_path / "dest"), shared=True).at == cursor(5)

    def test_what_is_no_plain_file_is_refused_unread(self, sealed):
        (sealed / "data" / "NOTE").unlink()
        os.mkfifo(sealed / "data" / "NOTE")
        refused(sealed, CorruptData, "data/NOTE is no plain file")

    @pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out", "a//b", "./NOTE", "a\\..\\b", "", "a\0b"])
    def test_a_path_that_leaves_data_is_refused(self, sealed, path):
        fields = json.loads((sealed / "MANIFEST.json").read_text())
        fields["files"][0]["path"] = path
        rewrite(sealed, files=fields["files"])
        refused(sealed, CorruptData, "MANIFEST.json is damaged")

    @pytest.mark.parametrize(
        "lie",
        [
            {"log_id": str(LOG), "next": 6, "term": 0},
            {"log_id": str(LOG), "next": 5, "term": 1},
            {"log_id": "00000000-0000-0000-0000-000000000009", "next": 5, "term": 0},
        ],
    )
    def test_a_cursor_that_differs_from_the_manifests_is_refused(self, sealed, lie):
        rewrite(sealed, cursor=lie)
        refused(sealed, CorruptData, "its data holds the cursor")

    def test_an_occupied_destination_is_refused_and_left_unchanged(self, sealed, tmp_path):
        (tmp_path / "dest").mkdir()
        (tmp_path / "dest" / "mine").write_text("here")
        before = tree(tmp_path)
        with pytest.raises(AlreadyExists, match="occupied"):
            TinyStore.import_from(str(sealed), str(tmp_path / "dest"))
        assert tree(tmp_path) == before

    def test_a_file_that_is_altered_while_it_is_imported_is_noticed_in_the_copy(self, sealed, tmp_path):
        class Meddler(RecordingDisk):
            def copy(self, source: str, target: str) -> None:
                Path(source).write_bytes(Path(source).read_bytes()[::-1])
                super().copy(source, target)

        with pytest.raises(CorruptData, match="was altered"):
            TinyStore.import_from(str(sealed), str(tmp_path / "dest"), env=Env(disk=Meddler()))
        assert not (tmp_path / "dest").exists()

    def test_a_copy_that_is_not_what_the_original_is_is_noticed(self, sealed, tmp_path):
        class Meddler(RecordingDisk):
            def copy(self, source: str, target: str) -> None:
                super().copy(source, target)
                Path(target).write_bytes(Path(target).read_bytes()[::-1])

        with pytest.raises(CorruptData, match="was altered"):
            TinyStore.import_from(str(sealed), str(tmp_path / "dest"), env=Env(disk=Meddler()))
        assert not (tmp_path / "dest").exists()

    def test_a_link_put_in_place_of_a_file_while_it_is_imported_brings_nothing_in(self, sealed, tmp_path):
        (tmp_path / "secret").write_bytes(b"a secret text")  # of the same size

        class Meddler(RecordingDisk):
            def copy(self, source: str, target: str) -> None:
                if source.endswith("NOTE"):
                    Path(source).unlink()
                    Path(source).symlink_to(tmp_path / "secret")
                super().copy(source, target)

        with pytest.raises(CorruptData, match="was altered"):
            TinyStore.import_from(str(sealed), str(tmp_path / "dest"), env=Env(disk=Meddler()))
        assert not (tmp_path / "dest").exists()

    def test_a_copy_that_cannot_be_opened_is_not_kept(self, sealed, tmp_path):
        def verify(folder: str):
            raise CorruptData("cannot be opened")

        with pytest.raises(CorruptData):
            unpack(str(sealed), str(tmp_path / "dest"), kind="tiny", kind_version=1, verify=verify)
        assert not (tmp_path / "dest").exists()

    @pytest.mark.usefixtures("unsynced")
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("dies", [False, True])
    def test_a_failure_or_a_death_at_any_operation_leaves_the_destination_as_it_was_or_whole(
        self, sealed, tmp_path, dies, after
    ):
        calm = DyingDisk()
        TinyStore.import_from(str(sealed), str(tmp_path / "calm" / "dest"), env=Env(disk=calm))
        last = next(number for number, done in enumerate(calm.done) if done.startswith("remove ")) + 1
        for number in range(last):
            place = tmp_path / f"{dies}{after}{number}"
            place.mkdir()
            (place / "dest").mkdir()
            disk = DyingDisk(number, dies=dies, after=after)
            try:
                TinyStore.import_from(str(sealed), str(place / "dest"), env=Env(disk=disk))
            except (Crash, StorageError):
                if not dies:
                    assert tree(place / "dest") == {}, f"a failure at {disk.done[number]} changed the destination"
                    assert (place / "dest").exists()
            if any((place / "dest").iterdir()):
                assert TinyStore(str(place / "dest")).at == cursor(5)
                (place / "dest").rename(place / "earlier")
            TinyStore.import_from(str(sealed), str(place / "dest"))
            left = {path.name for path in place.iterdir()} - {"dest", "earlier"}
            assert not left, f"{disk.done[number]} left {left}"


class TestNumbered:
    def take(self, store, folder: Path, offset: int) -> int:
        number = next_number(str(folder))
        store.set(store.state, cursor(offset))
        store.export_to(snapshot_folder(str(folder), number))
        return number

    def test_the_newest_valid_one_wins(self, store, tmp_path):
        folder = tmp_path / "many"
        assert newest_snapshot(str(folder)) is None
        assert [self.take(store, folder, offset) for offset in (10, 20, 30)] == [1, 2, 3]
        found = newest_snapshot(str(folder))
        assert found is not None
        assert (found.cursor, found.folder) == (cursor(30), snapshot_folder(str(folder), 3))

    def test_damaged_ones_are_passed_over_with_a_warning(self, store, tmp_path, caplog):
        folder = tmp_path / "many"
        for offset in (10, 20, 30, 40):
            self.take(store, folder, offset)
        (folder / f"{4:020d}" / "MANIFEST.json").unlink()
        (folder / f"{3:020d}" / "data" / "NOTE").write_bytes(b"a sECond file")
        with caplog.at_level(logging.WARNING):
            found = newest_snapshot(str(folder))
        assert found is not None
        assert found.cursor == cursor(20)
        assert len(caplog.records) == 2

    def test_a_damaged_one_keeps_its_number(self, store, tmp_path):
        folder = tmp_path / "many"
        self.take(store, folder, 10)
        (folder / f"{1:020d}" / "MANIFEST.json").unlink()
        assert next_number(str(folder)) == 2

    def test_names_that_are_no_numbers_are_left_alone(self, store, tmp_path):
        folder = tmp_path / "many"
        self.take(store, folder, 10)
        (folder / "notes").mkdir()
        (folder / "17").mkdir()
        (folder / f"{9:020d}").write_text("no folder")
        assert next_number(str(folder)) == 2
        assert trim(str(folder), keep=1) == []
        assert len(list(folder.iterdir())) == 4

    def test_trimming_keeps_the_newest_valid_ones(self, store, tmp_path):
        folder = tmp_path / "many"
        for offset in (10, 20, 30, 40, 50):
            self.take(store, folder, offset)
        (folder / f"{5:020d}" / "MANIFEST.json").unlink()
        (folder / f"{3:020d}" / "MANIFEST.json").unlink()
        assert trim(str(folder), keep=2) == [1]
        assert trim(str(folder), keep=1) == [2, 3]
        assert sorted(path.name for path in folder.iterdir()) == [f"{4:020d}", f"{5:020d}"]
        with pytest.raises(InvalidInput, match="keep at least 1"):
            trim(str(folder), keep=0)

    def test_a_death_while_trimming_leaves_no_half_of_a_snapshot(self, store, tmp_path):
        folder = tmp_path / "many"
        for offset in (10, 20):
            self.take(store, folder, offset)
        for number in range(1, 40):
            disk = DyingDisk(number, dies=True)
            try:
                trim(str(folder), keep=1, env=Env(disk=disk, chance=SeededChance(number)))
            except Crash:
                for path in folder.iterdir():
                    if not path.name.startswith("."):
                        check_snapshot(str(path))
            else:
                break
        assert [path.name for path in folder.iterdir()] == [f"{2:020d}"]
