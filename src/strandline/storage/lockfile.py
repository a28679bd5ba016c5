"""A lock between processes: ``flock`` on a file; the kernel releases it when the process dies."""

from __future__ import annotations

import fcntl
import os
from functools import partial
from io import FileIO

from strandline.storage.closing import Closing
from strandline.storage.file_append import speaking
from strandline.storage.fork_check import call_in_child
from strandline.storage.permissions import file_mode


class LockFile(Closing):
    """A lock that is held on purpose, or not at all.

    An exclusive ``flock`` belongs to the open file, which may stay open by accident. So the lock goes with this object,
    also when a signal interrupts whoever was about to close it; and a forked child closes its copy of the file at once,
    which would hold the lock as long as the child lives, also when the parent is done or dead.
    """

    def __init__(self) -> None:
        """Nothing is open yet."""
        # Not the bare descriptor: between two statements a signal would lose it, and nobody would ever close it.
        self._file: FileIO | None = None
        self._process = os.getpid()
        call_in_child(self, LockFile.close)  # before there is anything that another thread's fork could copy

    def take(self, path: str) -> bool:
        """Whether the lock is held now: False if someone else has it. The file is created if there is none."""
        with speaking(path, making=True):
            while True:
                self._file = file = FileIO(path, "a+", opener=partial(os.open, mode=file_mode()))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.close()
                    return False
                if os.fstat(file.fileno()).st_nlink:
                    return True
                self.close()  # somebody removed the file meanwhile: a lock on it keeps nobody out

    def close(self) -> None:
        """Let go of it; repeating that is fine. A forked child closes only its own copy of the file."""
        file = self._file
        if file is None or file.closed:
            return
        if self._process == os.getpid():
            fcntl.flock(file, fcntl.LOCK_UN)  # also for children that never came to close their copies
        file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # else it was interrupted when it was made
            self.close()
