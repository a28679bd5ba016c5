"""Producers, consumers and trimmers as programs of their own, for tests that kill them.

``python -m tests.log.object.programs`` does the job on its standard input until another line asks it to stop.
It ends at once when the input is closed, so that it does not outlive the test. What must survive it notes in a file.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import strandline as sl
from strandline.compat.v1.log import QueueFormat, QueueLog
from strandline.errors import OutcomeUnknown, OutOfOrder, ProducerFailed, StrandlineError
from strandline.log.object import ObjectLog
from strandline.model.head import Entry, WriterId
from strandline.model.records import record_batch

ROOT = Path(__file__).resolve().parents[3]
SOON = 120.0
"""Real seconds that nothing here should come near."""

LULL = 0.02
"""Seconds that writers pause at most, so that the machine has time to start others."""

GRACE = 0.2
"""Seconds that trimmed objects are kept in an object log: a slot needs no grace period."""

V1_GRACE = 8.0
"""The same for a queue of version 1, whose producers have half of it to list what they have uploaded."""

_NAMES = UUID(int=7)


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a program. ``name`` is that of its writer or slot; ``life`` counts its starts."""

    role: str
    name: str
    url: str
    notes: str
    options: dict[str, str] = field(default_factory=dict)
    queue: bool = False
    life: int = 0

    def open(self) -> ObjectLog | QueueLog:
        if self.queue:
            return sl.open(self.url, format=QueueFormat(grace=V1_GRACE), options=self.options)
        return sl.open(self.url, options=self.options)

    def chance(self) -> random.Random:
        return random.Random(f"{self.name}/{self.life}")


def start(errors: Path) -> subprocess.Popen[str]:
    """A new process that waits for a job; its standard error goes to a file."""
    command = [sys.executable, "-m", "tests.log.object.programs"]
    with errors.open("ab") as said:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True)


def tell(process: subprocess.Popen[str], line: Job | str) -> None:
    """Send a process its job, or the request to stop."""
    assert process.stdin is not None
    process.stdin.write(f"{line if isinstance(line, str) else json.dumps(asdict(line))}\n")
    process.stdin.flush()


def writer_of(name: str) -> WriterId:
    """A writer's identity, the same in all of its lives."""
    return WriterId(uuid5(_NAMES, name))


def values_of(name: str, number: int) -> list[str]:
    """The values of batch ``number`` of an appending writer: the same in all of its lives."""
    return [f"{name}/{number}/{index}" for index in range(1 + number % 4)]


# --- notes -------------------------------------------------------------------------------------------------------


def read_notes(path: str) -> list[dict[str, Any]]:
    """All notes of all lives, oldest first."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Notes:
    """A file to which a note is added durably before its writer continues."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, what: str, **details: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **details}).encode() + b"\n")  # in one piece
        os.fsync(self._file)


# --- what programs do --------------------------------------------------------------------------------------------


def append(job: Job, notes: Notes, stop: threading.Event) -> None:
    """Append numbered batches. What was under way when a life ended is repeated in the next, under the same number.

    On an object log the last one that was acknowledged is repeated too: whoever is not sure may do that.
    """
    log, writer, chance = job.open(), writer_of(job.name), job.chance()
    number = sum(note["what"] == "acknowledged" for note in read_notes(job.notes))
    if number and not job.queue:
        _append(log, writer, job.name, number - 1)
    while not stop.is_set():
        notes.write("try", number=number)
        receipt = _append(log, writer, job.name, number)
        values = values_of(job.name, number)
        notes.write("acknowledged", values=values, first=receipt.first)
        number += 1
        stop.wait(chance.random() * LULL)


def _append(log: ObjectLog | QueueLog, writer: WriterId, name: str, number: int) -> sl.log.Receipt:
    values = [value.encode() for value in values_of(name, number)]
    count = len(values)
    batch = record_batch(timestamps=range(count), ops=bytes(count), keys=[None] * count, values=values)
    return _again(lambda: log.append(batch, writer=writer, number=number).result(SOON))


def produce(job: Job, notes: Notes, stop: threading.Event) -> None:
    """Produce values that no other life has. What was not acknowledged is not repeated."""
    for turn in range(100):
        try:
            _produce(job, f"{job.name}/{job.life}.{turn}", notes, stop)
        except (OutOfOrder, ProducerFailed) as error:
            # The last request of a life before this one arrived after it was looked for: its number was taken.
            reason = error.__cause__ if isinstance(error, ProducerFailed) else error
            if not isinstance(reason, OutOfOrder):
                raise
            notes.write("number taken", reason=str(reason))
        else:
            return
    raise AssertionError("This producer's numbers are taken each time.")


def _produce(job: Job, series: str, notes: Notes, stop: threading.Event) -> None:
    chance, log = job.chance(), job.open()
    under_way: deque[tuple[list[str], list[Any]]] = deque()

    def settle() -> None:
        values, handles = under_way.popleft()
        notes.write("acknowledged", values=values, offsets=[handle.result(SOON).first for handle in handles])

    made = 0
    options = {} if isinstance(log, QueueLog) else {"writer": writer_of(job.name)}
    with log.producer(linger=0.005, batch_bytes=2_000, **options) as producer:
        while not stop.is_set():
            values = [f"{series}/{made + index}" for index in range(chance.randint(1, 12))]
            made += len(values)
            under_way.append((values, [producer.append(value=value.encode()) for value in values]))
            if len(under_way) > 3:
                settle()
            stop.wait(chance.random() * LULL)
        producer.flush(SOON)
        while under_way:
            settle()


def consume(job: Job, notes: Notes, stop: threading.Event) -> None:
    """Take batches, note what came, and only then acknowledge it. When told to stop, drain what there is."""
    chance, log = job.chance(), job.open()
    slot, every = ("default", None) if job.queue else (job.name, chance.choice([0.3, None]))
    with sl.Consumer(log, slot=slot, ack_every=chance.randint(1, 5), trim_every=every) as consumer:
        notes.write("opened", next=consumer.next_to_ack)
        while True:
            stopping = stop.is_set()  # before the look: what was listed by then has to be seen
            given = list(_taken(consumer, notes, chance.randint(1, 3)))
            if not given:
                consumer.flush()
                notes.write("durable", next=consumer.next_to_ack)
                if stopping:
                    return
                stop.wait(LULL)
            elif chance.random() < 0.4:
                consumer.ack_through(given[-1])
                notes.write("durable", next=given[-1] + 1)
            else:
                for sequence in given:
                    consumer.ack(sequence)


def _taken(consumer: sl.Consumer, notes: Notes, most: int) -> Iterator[int]:
    """Read ahead of the acknowledgements; sequences of what was noted."""
    for _ in range(most):
        batch = consumer.next_batch()
        if batch is None:
            return
        entry = batch.descriptor
        mark = (str(entry.writer), entry.number) if isinstance(entry, Entry) else None
        values = [value.decode() for value in batch.values if value is not None]
        offsets = batch.records["offset"].to_pylist()
        notes.write("given", sequence=batch.sequence, offsets=offsets, values=values, mark=mark)
        yield batch.sequence


def trim(job: Job, notes: Notes, stop: threading.Event) -> None:
    """Trim, over and over."""
    log = job.open()
    while not stop.is_set():
        if isinstance(log, QueueLog):
            notes.write("trimmed", deleted=len(log.trim().garbage), invalidated=[])
        else:
            done = _again(lambda: log.trim(grace=GRACE))
            gone = [state.name for state in done.invalidated]
            notes.write("trimmed", deleted=done.deleted, orphans=done.orphans, floor=done.floor, invalidated=gone)
        stop.wait(0.05)


def _again(action: Callable[[], Any]) -> Any:
    """The result of the action, which is retried after retryable errors."""
    for _ in range(100):
        try:
            return action()
        except StrandlineError as error:
            if not error.retryable and not isinstance(error, OutcomeUnknown):
                raise
    raise AssertionError("This was to be tried again a hundred times.")


ROLES = {"append": append, "produce": produce, "consume": consume, "trim": trim}


def _main() -> None:
    given, stop = sys.stdin.readline(), threading.Event()
    if not given:
        return  # there was nothing to do
    job = Job(**json.loads(given))

    def listen() -> None:
        if sys.stdin.readline():
            stop.set()
        else:
            os._exit(3)  # whoever started this is gone

    threading.Thread(target=listen, daemon=True).start()
    notes = Notes(job.notes)
    try:
        ROLES[job.role](job, notes, stop)
    except BaseException as error:
        notes.write("error", kind=type(error).__name__, said=str(error))
        raise


if __name__ == "__main__":
    _main()
