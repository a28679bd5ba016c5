"""Appenders and followers of a write-ahead log as processes of their own, for tests that kill them.

``python -m tests.log.wal.programs nest`` starts one appender for each line that it is given: by forking, since a new
interpreter takes longer than most of their lives. An appender reports each acknowledgement as a note of a fixed size
in one pipe, which a ``kill -9`` cannot tear. The nest notes that an appender has ended, after its last note.
``... follow FOLDER NOTES`` reads a log as another process does, and notes what it has seen in a file.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self
from zlib import crc32

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import CursorExpired, NotFound, NotReady
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor, Limit

ROOT = Path(__file__).resolve().parents[3]
SLOT = "behind"
_NOTE = struct.Struct("<QQQQ")
_PAYLOAD = struct.Struct("<III")
_SEEN = struct.Struct("<QQI")


class What(IntEnum):
    """What a note is about, and its three numbers."""

    STARTED = 0
    """The appender's process id."""
    OPENED = 1
    """The lsn that the log had when it was opened, and the oldest."""
    APPENDED = 2
    """A thread, its counter, and the lsn that it was given."""
    BATCHED = 3
    """The same for three records in one batch; the lsn is the first."""
    PINNED = 4
    """The position to which the slot is about to be moved."""
    PRUNED = 5
    """What trimming reached."""
    ENDED = 6
    """The status with which the appender ended."""


class Note(NamedTuple):
    what: What
    one: int
    two: int = 0
    three: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    """What an appender is to do until it is killed."""

    number: int
    folder: str
    threads: int = 64
    roll_bytes: int = 64 << 10
    trims: bool = False


class Said(NamedTuple):
    """Whose record it is."""

    life: int
    thread: int
    counter: int


def payload(said: Said) -> bytes:
    """What an appender's record holds."""
    return _PAYLOAD.pack(*said) + bytes(100 + said.counter % 7 * 30)


def said_in(value: bytes) -> Said:
    """Whose record this is; every byte of it is looked at."""
    said = Said(*_PAYLOAD.unpack_from(value))
    assert value == payload(said), "a record does not hold what was appended"
    return said


# --- from outside ------------------------------------------------------------------------------------------------


class Nest:
    """A process that starts appenders, seen by the test."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("ab") as complaints:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.log.wal.programs", "nest"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, life: Life) -> int:
        """Start an appender; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(life)).encode() + b"\n")
        self._process.stdin.flush()
        note = self.read()
        assert note.what is What.STARTED
        return note.one

    def read(self) -> Note:
        """The next note; waits for it."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(_NOTE.size)
        assert len(data) == _NOTE.size, self._errors.read_text(errors="replace")[-3000:]
        what, *numbers = _NOTE.unpack(data)
        return Note(What(what), *numbers)

    def rest(self) -> Iterator[Note]:
        """The notes up to the end of the appender that was killed; it must not have ended in another way."""
        while (note := self.read()).what is not What.ENDED:
            yield note
        assert note.one == 9, self._errors.read_text(errors="replace")[-3000:]


class Follower:
    """A process that reads a log, seen by the test."""

    def __init__(self, folder: str, notes: Path) -> None:
        self._notes = notes
        command = [sys.executable, "-m", "tests.log.wal.programs", "follow", folder, str(notes)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def finish(self, upto: int, timeout: float) -> list[tuple[int, int, int]]:
        """Let it read up to an offset and end; returns offset, count and checksum of each piece that it ever saw."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % upto)
        self._process.stdin.flush()
        assert self._process.wait(timeout) == 0
        return list(_SEEN.iter_unpack(self._notes.read_bytes()))


# --- an appender -------------------------------------------------------------------------------------------------


def tell(what: What, *numbers: int) -> None:
    """Note something, in one piece."""
    try:
        os.write(1, _NOTE.pack(what, *numbers, *[0] * (3 - len(numbers))))
    except BrokenPipeError:
        os._exit(0)  # whoever wanted to know is gone


def live(life: Life) -> None:
    """Append from many threads for ever. Some of them append batches; one trims, if it is to."""
    wal = WriteAheadLog.open(life.folder, roll_bytes=life.roll_bytes)
    tell(What.OPENED, wal.current, wal.oldest)
    work = [lambda thread=thread: append(wal, life, thread) for thread in range(life.threads)]
    if life.trims:
        work.append(lambda: trim(wal))
    for task in work:
        threading.Thread(target=run, args=(task,), daemon=True).start()
    threading.Event().wait()


def run(task: object) -> None:
    """Work in a thread; a failure ends the whole process, loudly."""
    try:
        task()  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 - it is passed on
        traceback.print_exc()
        os._exit(1)


def append(wal: WriteAheadLog, life: Life, thread: int) -> None:
    counter = 0
    while True:
        if thread % 8 == 7:
            three = [payload(Said(life.number, thread, counter + index)) for index in range(3)]
            tell(What.BATCHED, thread, counter, wal.append_many(three)[0])
            counter += 3
        else:
            tell(What.APPENDED, thread, counter, wal.append(payload(Said(life.number, thread, counter))))
            counter += 1


def trim(wal: WriteAheadLog) -> None:
    """Follow the end with a slot, a little behind it, and trim all that the slot allows."""
    if not wal.log.slots.list():
        wal.log.slots.create(SLOT, wal.oldest - 1)
    slot = wal.log.slots.claim(SLOT, f"process {os.getpid()}")
    while True:
        to = max(slot.state().position, wal.current - 1000)
        tell(What.PINNED, to)
        slot.advance(Cursor(wal.log.log_id, to))
        tell(What.PRUNED, wal.prune_through(wal.current))
        wal.wait(wal.current + 300, 120.0)


def nest() -> None:
    """Start appenders as asked, one after the other."""
    for line in sys.stdin.buffer:
        child = os.fork()
        if not child:
            tell(What.STARTED, os.getpid())
            run(lambda line=line: live(Life(**json.loads(line))))
        _, status = os.waitpid(child, 0)
        tell(What.ENDED, status)


# --- a follower --------------------------------------------------------------------------------------------------


def follow(folder: str, notes: str) -> None:
    """Read everything as it becomes durable, from the start of the log, up to an offset that is given later."""
    until: list[int] = []
    threading.Thread(target=lambda: until.append(int(sys.stdin.readline() or 0)), daemon=True).start()
    reader = WalReader(folder)
    cursor = reader.start()
    with open(notes, "ab", buffering=0) as file:
        while not until or cursor.next < until[0]:
            try:
                if not reader.wait(cursor, 0.05):
                    continue
                for span in reader.plan(cursor, Limit(records=5000)):
                    values = [value for batch in span.fetch(["value"]) for value in batch.column(0).to_pylist()]
                    assert len(values) == span.next - span.first
                    file.write(_SEEN.pack(span.first, len(values), crc32(b"".join(values))))
                    cursor = cursor.at(span.next)
            except (CursorExpired, NotFound):
                start = reader.start()
                assert start.next > cursor.next, "nothing that was asked for is trimmed"
                cursor = start
            except NotReady:
                continue


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["nest"]:
            nest()
        case ["follow", folder, notes]:
            follow(folder, notes)
