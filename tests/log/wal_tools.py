"""Disks and threads for tests of the write-ahead log: syncs that are held back or left out, and crews that must end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from strandline.log.wal.face import WriteAheadLog
from strandline.storage.disk import DISK

SOON = 60.0
"""Real seconds that nothing here should come near."""


class _Wrapped:
    """Another object, whatever is not said otherwise passed on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class GatedDisk(_Wrapped):
    """A disk whose open data files can be synced only while a gate is open. All else goes on."""

    def __init__(self, inner: Any = DISK) -> None:
        super().__init__(inner)
        self._gate = threading.Event()
        self._gate.set()
        self._reached = threading.Semaphore(0)

    @contextlib.contextmanager
    def open_log(self, folder: Path, **options: Any) -> Iterator[WriteAheadLog]:
        """A log on this disk; however the test ends, the gate is open again when the log is closed."""
        wal = WriteAheadLog.open(folder, disk=self, **options)
        try:
            yield wal
        finally:
            self.let_go()
            wal.close()

    def hold(self) -> None:
        """Let no sync through from now on."""
        self._gate.clear()

    def let_go(self) -> None:
        """Let all of them through again."""
        self._gate.set()

    def wait_until_held(self) -> None:
        """Block until a sync has been held back."""
        assert self._reached.acquire(timeout=SOON), "nobody has come to sync"

    def pass_through(self) -> None:
        if not self._gate.is_set():
            self._reached.release()
            assert self._gate.wait(SOON), "the gate was never opened"

    def open_append(self, path: str) -> Any:
        file = self._inner.open_append(path)
        return _GatedFile(file, self) if path.endswith(".log") else file


class _GatedFile(_Wrapped):
    def __init__(self, inner: Any, disk: GatedDisk) -> None:
        super().__init__(inner)
        self._disk = disk

    def sync(self) -> None:
        self._disk.pass_through()
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
    """Threads of a test: what any of them raises is raised at the end, and none is left behind."""

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
