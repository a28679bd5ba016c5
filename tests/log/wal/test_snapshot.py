"""Copies of a write-ahead log at one moment, and snapshots made of them."""

from __future__ import annotations

import threading
from functools import partial
from uuid import UUID

import pytest

from strandline.errors import AlreadyExists, CorruptData, NotFound
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import INDEX, data_name, firsts_in
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.snapshot import KIND, KIND_VERSION, fill, verify
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import Receipt, WriterId
from strandline.snapshots.sealed import seal, unpack
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.contracts.logs import records
from tests.disk_doubles import _PassingDisk
from tests.log.wal.workload import values

WRITER = WriterId(UUID(int=7))


def opened(folder, **options):
    return WalLog.open(str(folder), roll_bytes=2000, background=False, **options)


def grow(log, count, *, term=None, size=500):
    for _ in range(count):
        log.append_value(b"%d" % log.bounds().next + bytes(size), term=term).result()


def empty(folder):
    folder.mkdir()
    return str(folder)


class TestCopies:
    def test_a_copy_is_whole_on_a_machine_whose_clock_is_behind(self, tmp_path):
        with opened(tmp_path / "log") as log:
            grow(log, 3)
            cursor = fill(log, empty(tmp_path / "copy"))
        behind = Env(clock=ManualClock(now=CLOCK.now() - 86_400_000_000))
        assert verify(str(tmp_path / "copy"), env=behind) == cursor

    def test_a_copy_holds_what_was_durable_and_is_a_log_of_the_same_identity(self, tmp_path):
        with opened(tmp_path / "log") as log:
            grow(log, 9, term=1)
            log.append(records(b"x", b"y"), writer=WRITER, number=0).result()
            grow(log, 4, term=3)
            log.slots.create("billing", 3)
            cursor = fill(log, empty(tmp_path / "copy"))
            assert cursor == log.end() == Cursor(log.log_id, 15, 3)
            assert verify(str(tmp_path / "copy")) == cursor
            held = values(log)
        with opened(tmp_path / "copy", create=False) as copy:
            assert (copy.log_id, copy.end(), copy.bounds()) == (cursor.log_id, cursor, Bounds(0, 15))
            assert values(copy) == held
            assert copy.slots.list() == []
            assert copy.append(records(b"x"), writer=WRITER, number=0).result() == Receipt(9, 2)
            assert copy.append(records(b"z"), writer=WRITER, number=1).result() == Receipt(15, 1)

    def test_what_is_appended_later_is_not_in_it(self, tmp_path):
        disk = Interrupted()
        with opened(tmp_path / "log", env=Env(disk=disk)) as log:
            grow(log, 5, term=1)
            end = log.end()
            disk.then = lambda _: grow(log, 1, term=2)
            assert fill(log, empty(tmp_path / "copy")) == end
            disk.then = None
            assert log.end().next > 5
        assert verify(str(tmp_path / "copy")) == end
        assert sorted(values(WalReader(str(tmp_path / "copy")))) == [0, 1, 2, 3, 4]

    def test_a_trimmed_log_is_copied_from_where_it_begins(self, tmp_path):
        with opened(tmp_path / "log") as log:
            grow(log, 20)
            log.trim(11)
            fill(log, empty(tmp_path / "copy"))
        reader = WalReader(str(tmp_path / "copy"))
        assert reader.bounds() == Bounds(11, 20)
        assert sorted(values(reader)) == list(range(11, 20))

    @pytest.mark.parametrize("count", [0, 3, 20])
    def test_a_log_without_records_is_copied_with_its_end_its_term_and_its_writers(self, tmp_path, count):
        with opened(tmp_path / "log") as log:
            log.append(records(b"x"), writer=WRITER, number=0).result()
            grow(log, count, term=4)
            log.trim(99)
            cursor = fill(log, empty(tmp_path / "copy"))
            assert cursor == log.end()
        assert verify(str(tmp_path / "copy")) == cursor
        with opened(tmp_path / "copy", create=False) as copy:
            assert copy.end() == cursor
            assert copy.append(records(b"x"), writer=WRITER, number=0).result() == Receipt(0, 1)

    def test_a_new_log_is_copied(self, tmp_path):
        with opened(tmp_path / "log") as log:
            assert fill(log, empty(tmp_path / "copy")) == verify(str(tmp_path / "copy")) == log.end()

    def test_a_folder_with_anything_in_it_is_refused(self, tmp_path):
        with opened(tmp_path / "log") as log, pytest.raises(AlreadyExists):
            fill(log, str(tmp_path))


class Interrupted(_PassingDisk):
    """A disk that calls a function before it reads or copies a file of frames."""

    then = None

    def copy(self, source, target):
        self._interrupt(source)
        super().copy(source, target)

    def read(self, path, start=0, length=None):
        self._interrupt(path)
        return super().read(path, start, length)

    def _interrupt(self, path):
        if path.endswith(".log") and self.then is not None:
            self.then(path)


class TestBesideOthers:
    def test_records_that_are_trimmed_meanwhile_are_in_it_and_go_with_the_next_trim(self, tmp_path):
        for number in range(1, 40):
            disk = Interrupted()
            with opened(tmp_path / f"log-{number}", env=Env(disk=disk)) as log:
                grow(log, 20, term=1)
                held, seen = values(log), []

                def trim(path, log=log, seen=seen, number=number):
                    seen.append(path)
                    if len(seen) == number:
                        log.trim(13)

                disk.then = trim
                target = empty(tmp_path / f"copy-{number}")
                cursor = fill(log, target)
                disk.then = None
                assert cursor == verify(target) == log.end()
                reader = WalReader(target)
                assert reader.bounds() == Bounds(0, 20)
                assert values(reader) == held
                log.trim(13)
                assert min(values(log)) == 13
                assert firsts_in(DISK.scan(log.folder))[0] > 0
                if len(seen) < number:
                    return
        raise AssertionError("there are more reads than expected")

    def test_when_everything_is_trimmed_meanwhile_it_is_still_copied(self, tmp_path):
        disk = Interrupted()
        with opened(tmp_path / "log", env=Env(disk=disk)) as log:
            grow(log, 20, term=1)
            end, todo = log.end(), [1]

            def trim_and_grow(_path):
                if todo:
                    todo.pop()
                    log.trim(99)
                    grow(log, 3, term=2)

            disk.then = trim_and_grow
            assert fill(log, empty(tmp_path / "copy")) == verify(str(tmp_path / "copy")) == end
            assert sorted(values(WalReader(str(tmp_path / "copy")))) == list(range(20))
            assert sorted(values(log)) == [20, 21, 22]

    def test_appends_and_new_files_continue_meanwhile(self, tmp_path):
        with WalLog.open(str(tmp_path / "log"), roll_bytes=20_000) as log:
            stop = threading.Event()

            def append():
                while not stop.is_set():
                    log.append_value(bytes(900)).result()

            thread = threading.Thread(target=append)
            thread.start()
            try:
                for number in range(5):
                    before = log.bounds().next
                    cursor = fill(log, empty(tmp_path / f"copy-{number}"))
                    assert before <= cursor.next <= log.bounds().next
                    assert verify(str(tmp_path / f"copy-{number}")) == cursor
            finally:
                stop.set()
                thread.join()

    def test_a_file_that_is_missing_and_was_not_trimmed_is_an_error(self, tmp_path):
        with opened(tmp_path / "log") as log:
            grow(log, 20)
            for number, first in enumerate(firsts_in(DISK.scan(log.folder))[1::-1]):
                (tmp_path / "log" / data_name(first)).unlink()
                with pytest.raises(NotFound, match=data_name(first)):
                    fill(log, empty(tmp_path / f"copy-{number}"))


class TestVerifying:
    @pytest.fixture
    def copy(self, tmp_path):
        with opened(tmp_path / "log") as log:
            grow(log, 12, term=1)
            fill(log, empty(tmp_path / "copy"))
        return tmp_path / "copy"

    def test_verifying_changes_nothing(self, copy):
        before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in copy.iterdir()}
        verify(str(copy))
        assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in copy.iterdir()} == before

    @pytest.mark.matrix
    def test_a_changed_byte_anywhere_is_found(self, copy):
        for path in sorted(copy.iterdir()):
            whole = path.read_bytes()
            if path.name.endswith(".index"):
                continue  # it is only a help, and can be made again
            for at in range(0, len(whole), 211):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
                with pytest.raises(CorruptData):
                    verify(str(copy))
            path.write_bytes(whole)
        verify(str(copy))

    def test_a_byte_too_many_or_too_few_is_found(self, copy):
        last = max(copy.glob("*.log"))
        whole = last.read_bytes()
        for data in (whole + b"x", whole[:-1], whole[: len(whole) // 2]):
            last.write_bytes(data)
            with pytest.raises(CorruptData):
                verify(str(copy))

    def test_a_missing_file_is_found_but_for_an_index(self, copy):
        for path in sorted(copy.iterdir()):
            whole = path.read_bytes()
            path.unlink()
            if path.name.endswith(".index"):
                verify(str(copy))
            else:
                with pytest.raises(CorruptData):
                    verify(str(copy))
            path.write_bytes(whole)

    def test_an_empty_folder_is_no_copy(self, tmp_path):
        with pytest.raises(CorruptData):
            verify(str(tmp_path))


def test_a_sealed_snapshot_unpacks_to_the_log_that_it_was_made_of(tmp_path):
    with opened(tmp_path / "log") as log:
        grow(log, 9, term=1)
        log.append(records(b"x", b"y"), writer=WRITER, number=0).result()
        grow(log, 30, term=5, size=90)
        log.trim(3)
        cursor, held = log.end(), values(log)
        sealed = seal(
            str(tmp_path / "sealed"),
            kind=KIND,
            kind_version=KIND_VERSION,
            cursor=cursor,
            fill=partial(fill, log),
            verify=verify,
        )
        assert sealed.cursor == cursor
    assert any(file.path.endswith(INDEX) for file in sealed.files)
    unpack(str(tmp_path / "sealed"), str(tmp_path / "node"), kind=KIND, kind_version=KIND_VERSION, verify=verify)
    with opened(tmp_path / "node", create=False) as copy:
        assert (copy.log_id, copy.end(), copy.term) == (cursor.log_id, cursor, 5)
        assert values(copy) == held
        assert copy.append(records(b"x"), writer=WRITER, number=0).result() == Receipt(9, 2)
        assert copy.append(records(b"z"), writer=WRITER, number=1, expect=41).result() == Receipt(41, 1)


def test_a_copy_into_a_folder_that_is_not_there_names_that_folder_and_not_the_log(tmp_path):
    with opened(tmp_path / "log") as log:
        log.append_value(b"x").result()
        with pytest.raises(NotFound, match=r"There is no folder \S*/copy for a copy of the log in \S*/log: make it"):
            fill(log, str(tmp_path / "copy"))
        (tmp_path / "file").touch()
        with pytest.raises(AlreadyExists, match="file is not empty"):
            fill(log, str(tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "log"]
