"""A client that remembers what it was told, and a checker of whether that is so on all nodes."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from uuid import uuid4

import pyarrow as pa

from strandline.errors import Fenced, InvalidInput, NotReady, Overloaded, TransientStorageError
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.messages import Commit, TimedOut
from tests.node.processes import ClusterOfProcesses

_DOUBTFUL = (TransientStorageError, NotReady, Fenced, Overloaded)
"""What a client may be told while nodes die; anything else is a fault."""

COLUMNS = ["offset", "timestamp", "op", "key", "value"]


class Mark(NamedTuple):
    """Which record of whom."""

    writer: str
    number: int
    index: int


def value_of(mark: Mark, size: int) -> bytes:
    """What a record holds: it says whose it is, and every byte of it follows from that."""
    head = f"{mark.writer}/{mark.number}/{mark.index}/".encode()
    return head + hashlib.shake_128(head).digest(size)


def mark_in(value: bytes) -> Mark:
    """Whose record this is; every byte of it is looked at."""
    writer, number, index, rest = value.split(b"/", 3)
    mark = Mark(writer.decode(), int(number), int(index))
    assert value == value_of(mark, len(rest)), f"the record of {mark} does not hold what was appended"
    return mark


def append(log: RemoteLog, writer: WriterId, number: int, *, count: int = 1, size: int = 50, **options: Any) -> Commit:
    """Append a numbered batch whose records tell whose they are."""
    values = [value_of(Mark(str(writer), number, index), size) for index in range(count)]
    return log.append(pa.table({"value": pa.array(values, pa.binary())}), writer=writer, number=number, **options)


def new_writer() -> WriterId:
    return WriterId(uuid4())


@dataclass
class Recorder:
    """Appends from threads to whoever leads until it is left, and keeps what was acknowledged. A context manager.

    An append whose outcome is not known is repeated with its number until it is acknowledged.
    """

    cluster: ClusterOfProcesses
    writers: int = 3
    count: int = 3
    size: int = 50
    timeout: float = 0.5
    acknowledged: dict[Mark, int | None] = field(default_factory=dict)
    """And where it is, unless the primary did not know that any more."""
    doubts: Counter[str] = field(default_factory=Counter)
    """What it was told instead, by class."""
    wrong: list[BaseException] = field(default_factory=list)
    by: Counter[str] = field(default_factory=Counter)
    """How many appends each node acknowledged."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._write, daemon=True) for _ in range(self.writers)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.wrong, self.wrong

    def _write(self) -> None:
        writer = new_writer()
        try:
            for number in range(1 << 30):
                if not self._insist(writer, number):
                    return
        except BaseException as error:
            self.wrong.append(error)
            raise

    def _insist(self, writer: WriterId, number: int) -> bool:
        """Append until it is acknowledged (True), or nobody wants more (False)."""
        name = ""
        while not self._stop.is_set():
            name = name or self._find()
            try:
                log = self.cluster.clients[name]
                commit = append(log, writer, number, count=self.count, size=self.size, timeout=self.timeout)
            except (*_DOUBTFUL, KeyError, InvalidInput) as error:
                if isinstance(error, InvalidInput):
                    raise
                self._doubt(type(error).__name__)
                name = ""
                self._stop.wait(0.02)
                continue
            if not isinstance(commit.outcome, TimedOut):
                self.acknowledge(writer, number, commit, name)
                return True
            self._doubt("TimedOut")
        return False

    def _find(self) -> str:
        while not self._stop.is_set():
            leading = [each for each in self.cluster.statuses().values() if each.condition == "leading"]
            if leading:
                return max(leading, key=lambda each: each.term).name
            self._stop.wait(0.02)
        return ""

    def _doubt(self, what: str) -> None:
        with self._lock:
            self.doubts[what] += 1

    def acknowledge(self, writer: WriterId, number: int, commit: Commit, name: str = "") -> None:
        """Remember that an append was acknowledged."""
        receipt = commit.receipt
        with self._lock:
            self.by[name] += 1
            for index in range(receipt.count):
                at = None if receipt.first is None else receipt.first + index
                self.acknowledged[Mark(str(writer), number, index)] = at

    def more(self, count: int = 30) -> None:
        """Wait until ``count`` more records are acknowledged."""
        enough = len(self.acknowledged) + count
        self.cluster.until(
            lambda: self.wrong or len(self.acknowledged) >= enough, f"{count} more records are acknowledged"
        )
        assert not self.wrong, self.wrong


# --- checking ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """What a node holds: the records in order, and a hash of all that they are."""

    rows: list[tuple[int, bytes]]
    digest: str

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch]) -> Content:
        rows: list[tuple[int, bytes]] = []
        digest = hashlib.sha256()
        for batch in batches:
            for row in zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True):
                digest.update(repr((row[:-1], len(row[-1]))).encode() + row[-1])
                rows.append((row[0], row[-1]))
        return cls(rows, digest.hexdigest())


def content_of_files(folder: str) -> Content:
    """What a log's files hold, read as another process does, and once more by who repairs them."""
    reader = WalReader(folder)
    seen = Content.of(reader.read())
    with WalLog.open(folder, create=False, background=False) as log:
        assert Content.of(log.read()) == seen
        assert log.verify().is_clean
    return seen


def batches_of_files(folder: str) -> list[tuple[object, ...]]:
    """How a log's records lie in batches: offsets, terms, writers and numbers."""
    reader = WalReader(folder)
    spans = reader.plan(Cursor(reader.log_id, reader.bounds().first))
    return [(batch.first, batch.count, batch.term, batch.append) for batch in (span.batch() for span in spans)]


def check(cluster: ClusterOfProcesses, recorder: Recorder, *, tiered: bool = False) -> list[Mark]:
    """All nodes run and agree; then they are stopped. Returns what is in the log, in order.

    Everything that was acknowledged is there once, where that was said; nothing is there twice, or out of order; and
    all copies are the same, as they are read over the wire and in their files. With a cold tier, files hold only the
    end of the log.
    """
    cluster.settled()
    served = {name: Content.of(cluster.clients[name].read()) for name in cluster.names}
    cluster.stop(*cluster.names)
    stored = {name: content_of_files(cluster.data(name)) for name in cluster.names}
    digests = {content.digest for content in (*served.values(), *(() if tiered else stored.values()))}
    assert len(digests) == 1, {name: len(served[name].rows) for name in cluster.names}
    layouts = [batches_of_files(cluster.data(name)) for name in cluster.names]
    assert tiered or all(layout == layouts[0] for layout in layouts)
    rows = served[cluster.names[0]].rows
    for name in cluster.names:
        assert stored[name].rows == rows[len(rows) - len(stored[name].rows) :]
    assert [offset for offset, _ in rows] == list(range(len(rows)))
    found = [mark_in(value) for _, value in rows]
    twice = [mark for mark, times in Counter(found).items() if times > 1]
    assert not twice, f"twice: {twice[:5]}"
    places = {mark: offset for offset, mark in enumerate(found)}
    for mark, offset in recorder.acknowledged.items():
        assert mark in places, f"{mark} was acknowledged at {offset}, and is gone"
        assert offset in (None, places[mark]), f"{mark} was acknowledged at {offset}, and is at {places[mark]}"
    by_writer: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for mark in found:
        by_writer[mark.writer].append((mark.number, mark.index))
    for writer, marks in by_writer.items():
        assert marks == sorted(marks), f"what {writer} wrote is out of order"
    return found
