"""For tests of the write-ahead log: disks that block or skip syncs, threads that must end, and all changing calls."""

from __future__ import annotations

import contextlib
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import StrandlineError
from strandline.log.contract import Slot
from strandline.model.retention import InvalidReason
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from tests.contracts.logs import records, writer_named

SOON = 120.0
"""Real seconds that nothing here should come near."""


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns often, so that they meet where they should not."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class _Wrapped:
    """Another object, whatever is not said otherwise passed on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class GatedDisk(_Wrapped):
    """A disk that blocks chosen calls: a ``write`` or ``sync`` of an open data file, or any ``remove``."""

    def __init__(self, inner: Any = DISK) -> None:
        super().__init__(inner)
        self._held: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._reached = threading.Semaphore(0)

    @contextlib.contextmanager
    def open_log(self, folder: Path, **options: Any) -> Iterator[WriteAheadLog]:
        """A log on this disk; however the test ends, nothing is held back any more when the log is closed."""
        wal = WriteAheadLog.open(folder, env=Env(disk=self), **options)
        try:
            yield wal
        finally:
            self.let_go()
            wal.close()

    def hold(self, *operations: str) -> None:
        """Let none of these through from now on, and all others; a sync if nothing is said."""
        with self._changed:
            self._held = frozenset(operations or ("sync",))
            self._changed.notify_all()

    def let_go(self) -> None:
        """Let everything through again."""
        with self._changed:
            self._held = frozenset()
            self._changed.notify_all()

    def wait_until_held(self) -> None:
        """Block until something has been held back."""
        assert self._reached.acquire(timeout=SOON), "nobody has come to the gate"

    def pass_through(self, operation: str) -> None:
        with self._changed:
            if operation in self._held:
                self._reached.release()
                assert self._changed.wait_for(lambda: operation not in self._held, SOON), "the gate was never opened"

    def open_append(self, path: str) -> Any:
        file = self._inner.open_append(path)
        return _GatedFile(file, self) if path.endswith(".log") else file

    def remove(self, path: str) -> None:
        self.pass_through("remove")
        self._inner.remove(path)


class _GatedFile(_Wrapped):
    def __init__(self, inner: Any, disk: GatedDisk) -> None:
        super().__init__(inner)
        self._disk = disk

    def write(self, parts: Any) -> None:
        self._disk.pass_through("write")
        self._inner.write(parts)

    def sync(self) -> None:
        self._disk.pass_through("sync")
        self._inner.sync()


class UnsyncedDisk(_Wrapped):
    """The machine's disk, with nothing synced: for races, which do not need it and have thousands of rounds."""

    def __init__(self) -> None:
        super().__init__(DISK)

    def write_new(self, path: str, parts: Any) -> None:
        with open(path, "xb") as file:
            file.write(b"".join(parts))

    def open_append(self, path: str) -> Any:
        return _UnsyncedFile(self._inner.open_append(path))

    def sync_file(self, path: str) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


class _UnsyncedFile(_Wrapped):
    def sync(self) -> None:
        pass


class Threads:
    """Threads of a test: what any of them raises is raised at the end, and none is left running."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        """Set when one has failed, and at the end: who runs until told looks at it."""

    def start(self, work: Callable[..., object], *arguments: object) -> threading.Thread:
        """Run this in a thread of its own."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - it is passed on
                self.errors.append(error)
                self.stop.set()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        """Wait until all have ended, and raise what the first that failed has raised."""
        for thread in self._threads:
            thread.join(SOON)
        if self.errors:
            raise self.errors[0]
        assert not [thread for thread in self._threads if thread.is_alive()], "a thread hangs"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop.set()
        self.join()


# --- what appenders say ------------------------------------------------------------------------------------------

_SAID = struct.Struct("<II")


def said(who: int, counter: int) -> bytes:
    """A value with the number of its appender, and how many that one appended before."""
    return _SAID.pack(who, counter) + bytes(counter % 50)


class Witness:
    """Checks records as they come: consecutive lsns, and the values of each appender in the order of its counter."""

    def __init__(self, since: int) -> None:
        self.next = since
        """The offset that comes next."""
        self.skips = 0
        self._counters: dict[int, int] = {}

    def see(self, lsn: int, value: bytes) -> None:
        assert lsn == self.next + 1, f"lsn {lsn} came where {self.next + 1} follows"
        self.next = lsn
        who, counter = _SAID.unpack_from(value)
        assert value == said(who, counter)
        before = self._counters.get(who)
        assert before is None or counter == before + 1, f"{counter} of {who} came behind {before}"
        self._counters[who] = counter

    def skip(self, wal: WriteAheadLog) -> None:
        """What follows has expired, and nothing else may be said so."""
        start = wal.oldest - 1
        assert start > self.next, f"offset {self.next} was said to be expired, and the log begins at {start}"
        self.next = start
        self.skips += 1
        self._counters.clear()


# --- what changes a log ------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[WriteAheadLog, Slot], object]] = {
    "append": lambda wal, _: wal.append(b"x"),
    "submit": lambda wal, _: wal.submit(b"x"),
    "append_many": lambda wal, _: wal.append_many([b"x"]),
    "append_batch": lambda wal, _: wal.append_batch(records(b"x")),
    "append at an lsn": lambda wal, _: wal.append(b"x", lsn=wal.current + 1),
    "append in a term": lambda wal, _: wal.append(b"x", term=3),
    "append as a writer": lambda wal, _: wal.log.append(records(b"x"), writer=writer_named(1), number=0),
    "trim": lambda wal, _: wal.prune_through(1),
    "trim nothing": lambda wal, _: wal.prune_through(0),
    "trim beyond slots": lambda wal, _: wal.log.trim(wal.current, beyond_slots=True),
    "create a slot": lambda wal, _: wal.log.slots.create("new", wal.current),
    "claim a slot": lambda wal, _: wal.log.slots.claim("old", "someone"),
    "reset a slot": lambda wal, _: wal.log.slots.reset("old", wal.current),
    "drop a slot": lambda wal, _: wal.log.slots.drop("old"),
    "invalidate a slot": lambda wal, _: wal.log.slots.invalidate("old", InvalidReason.HORIZON),
    "advance a slot": lambda wal, slot: slot.advance(wal.log.end()),
    "touch a slot": lambda _, slot: slot.touch(),
    "flush the slots": lambda wal, _: wal.log.slots.flush(),
}
"""All that changes a log, tried with a slot of the name ``old`` that was claimed."""


def refusals(wal: WriteAheadLog, slot: Slot) -> dict[str, str]:
    """Try each change; which error it was refused with."""
    told = {}
    for what, change in CHANGES.items():
        try:
            change(wal, slot)
        except StrandlineError as error:
            told[what] = type(error).__name__
        else:
            told[what] = "done"
    return told


def kept(folder: Path) -> dict[str, bytes]:
    """Everything in the folder of a log."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
