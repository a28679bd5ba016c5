"""A node over one real log, with as little of a primary as the transport's tests need."""

import threading
from uuid import UUID

import pyarrow as pa

from strandline.errors import NotFound
from strandline.formats.checksum import crc32c
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.model.node import Heartbeat
from strandline.model.records import record_batch
from strandline.node.messages import (
    Acknowledgement,
    Commit,
    ElectionReport,
    Handover,
    Member,
    NodeStatus,
    NotRequired,
    Reached,
    Registration,
    Rewind,
    SnapshotChunk,
    SnapshotOffer,
    TimedOut,
    Topology,
)
from strandline.node.tickets import Tickets
from strandline.storage.env import SYSTEM

CHUNK = 1 << 20


def records(*values, keys=None):
    count = len(values)
    return record_batch(
        timestamps=list(range(count)), ops=[0] * count, keys=keys or [b"k"] * count, values=list(values)
    )


def values_of(batches):
    return [value for batch in batches for value in batch.column("value").to_pylist()]


class Feed:
    """The log's batches; closing and failing can be watched and told."""

    def __init__(self, node, since):
        self.node, self.at, self.heartbeat, self.closed = node, since, None, False

    def wait(self, timeout):
        del timeout
        return 0

    def take(self, timeout):
        if self.node.feed_error is not None:
            raise self.node.feed_error
        log = self.node.log
        spans = log.plan(self.at, Limit(bytes=8 << 20))
        if not spans and log.wait(self.at, timeout):
            spans = log.plan(self.at, Limit(bytes=8 << 20))
        self.heartbeat = self.node.heartbeat()
        found = [span.batch() for span in spans]
        if found:
            self.at = Cursor(log.log_id, found[-1].next, found[-1].term)
        return found

    def close(self):
        self.closed = True
        self.node.closed_feeds.release()


class Readable:
    """The log up to a watermark that the test sets."""

    def __init__(self, node):
        self.node, self.log_id, self.start = node, node.log.log_id, node.log.start
        self.cursor_at = node.log.cursor_at

    def bounds(self):
        bounds = self.node.log.bounds()
        return Bounds(bounds.first, bounds.next if self.node.watermark is None else self.node.watermark)

    def end(self):
        return Cursor(self.log_id, self.bounds().next)

    def plan(self, since, limit):
        upto = self.bounds().next if limit.upto is None else min(limit.upto, self.bounds().next)
        return [] if since.next >= upto else self.node.log.plan(since, Limit(None, limit.bytes, limit.batches, upto))

    def ended(self, at):
        return False

    def wait(self, past, timeout):
        self.node.waits += 1
        self.node.at_wait.pop(self.node.waits, lambda: None)()
        return self.node.log.wait(past, timeout) if self.node.watermark is None else False


class Node:
    """What satisfies ``NodeService``, and remembers what it was asked."""

    def __init__(self, folder):
        self.log = WalLog.open(str(folder))
        self.tickets = Tickets(f"{folder}/tickets.json", env=SYSTEM)
        self.tickets.rotate()
        self.watermark = None
        self.epoch = 0
        self.error = None  # raised by every call
        self.feed_error = None
        self.refused = None
        self.asked = []
        self.answer = PartialResync(Cursor(self.log.log_id, 0))
        self.outcome = NotRequired()
        self.files = {}
        self.waits = 0
        self.at_wait = {}  # what to do when a reader waits for the n-th time
        self.closed_feeds = threading.Semaphore(0)
        self.heard = threading.Semaphore(0)  # once for each thing that was asked

    def note(self, *what):
        self.asked.append(what)
        self.heard.release()
        if self.error is not None:
            raise self.error

    def heartbeat(self):
        end = self.log.bounds().next
        return Heartbeat(3, 1, end, end if self.watermark is None else self.watermark, self.epoch)

    @property
    def node(self):
        return self

    primary = node_folder = node

    @property
    def slots(self):
        return self.log.slots

    def append_at(self, offset):
        return self.log.append_at(offset)

    def register(self, caller, *, region):
        self.note("register", caller, region)
        return Registration(self.topology(caller), None)

    def unregister(self, caller, *, keep_slot):
        self.note("unregister", caller, keep_slot)

    def rotate_keys(self):
        self.note("rotate_keys")

    def resume(self, caller, since):
        self.note("resume", caller, since)
        return self.answer

    def feed(self, caller, since):
        self.note("feed", caller, since)
        return Feed(self, since)

    def acknowledge(self, caller, progress):
        self.note("acknowledge", caller, progress)
        return Acknowledgement(self.heartbeat(), self.refused)

    def acknowledge_nowait(self, caller, progress):
        self.note("acknowledge_nowait", caller, progress)
        return self.refused

    def begin_snapshot(self, caller, kind):
        self.note("begin_snapshot", caller, kind)
        return SnapshotOffer("snapshot-1", b'\x00\xff{"not": "text"}')

    def chunks(self, caller, snapshot, path, offset):
        self.note("chunks", caller, snapshot, path, offset)
        if path not in self.files:
            raise NotFound(f"There is no {path}.")
        data = self.files[path]
        for at in range(offset, len(data), CHUNK):
            piece = data[at : at + CHUNK]
            yield SnapshotChunk(at, piece, crc32c(piece))

    def end_snapshot(self, caller, cursor):
        self.note("end_snapshot", caller, cursor)

    def topology(self, caller):
        self.note("topology", caller)
        replica = Member("replica-1", None, 5, None, 4, 1, 0, 10, 20, True, False)
        other = Member("replique", "eu", 5, 5, 4, 0, 2, 10, 20, False, True)
        return Topology(self.log.log_id, "primary", 3, 1, 9, "ack_n(1)", 7, 5, (replica, other))

    def handover(self, caller, *, membership=(0, 0)):
        del membership
        self.note("handover", caller)
        return Handover((), self.tickets.keys())

    def report(self, caller):
        self.note("report", caller)
        return ElectionReport("primary", 3, 2, 7, 5, None)

    def append(self, records, *, append, policy, timeout, expect=None, seal=False):
        self.note("append", append, policy and str(policy), timeout)
        handle = self.log.append_batch(records, writer=append and append[0], number=append and append[1], seal=seal)
        return Commit(handle.result(120), self.outcome, self.log.end(), handle.repeated)

    def reading(self):
        return Readable(self)

    def promote(self, *, force):
        self.note("promote", force)
        return self.topology(None)

    def status(self):
        self.note("status")
        return NodeStatus("primary", "leading", None, 3, "primary", self.log.end(), 5)

    def rebootstrap(self):
        self.note("rebootstrap")

    def close(self):
        self.log.close()


ANSWERS = [
    PartialResync(Cursor(UUID(int=7), 4, 2)),
    Rewind(3, 1),
    FullRebootstrap(Cause.WAL_REMOVED),
    FullRebootstrap(Cause.NEW),
]
OUTCOMES = [NotRequired(), Reached(12), TimedOut(3, "quorum(a,b,c)", 0.25)]
TABLE = pa.table({"value": pa.array([b"a", b"b"], pa.binary())})


def until(condition):
    """Wait until something is so."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to that")
