"""A version 1 queue with the API of a log, and its spans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal
from uuid import UUID, uuid5

import pyarrow as pa

from strandline.compat.v1 import edits
from strandline.compat.v1.edits import checked_path, stored_as, time_of
from strandline.compat.v1.format import decode_queue_batch
from strandline.compat.v1.gc import GRACE, Collection, QueueCollector
from strandline.compat.v1.shipper import ManifestCell, QueueShipper
from strandline.errors import AlreadyExists, InvalidInput, NotFound
from strandline.formats.arrow.block import Compression
from strandline.log import slots as rules
from strandline.log.contract import Handle, LogReading
from strandline.log.folders import FolderKind, check_missing
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.object.upload import PAGE_ROWS
from strandline.log.planning import check_fingerprint, known_columns
from strandline.log.produce.buffer import Limits
from strandline.log.produce.handles import settled
from strandline.log.produce.producer import Producer
from strandline.log.produce.typed import ValueEncoder
from strandline.log.reading import HeadPoller
from strandline.log.value_format import named_codec
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import Duration, Timeout, checked
from strandline.model.cursor import MILLISECOND, NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import Descriptor, MetadataRanges, QueueEntry, QueueManifest, WriterId
from strandline.model.records import READ_SCHEMA, RecordSource, conform
from strandline.model.retention import SlotState
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.disk import DISK
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.metrics import fetching
from strandline.storage.store import ObjectStore
from strandline.storage.urls import local_folder, store_at
from strandline.values.contract import Codec


@dataclass(frozen=True, slots=True)
class QueueFetcher:
    """Reads the batches of a queue; see :class:`~strandline.log.queue.contract.Fetcher`."""

    store: ObjectStore

    def fetch(self, descriptor: Descriptor) -> list[pa.RecordBatch]:
        """The batch's records, fully checked; the offset of each is the batch's sequence.

        A record's timestamp is the ingestion time of its metadata range; without one, the time in the object's
        name, or 0.
        """
        location = descriptor.location
        where = f"{self.store.url}/{location}"
        with fetching() as count:
            data = self.raw(descriptor)
            batch = decode_queue_batch(data, where, metadata=descriptor.metadata, uncovered=time_of(location) or 0)
            count(batch.num_rows, len(data))
        offsets = pa.repeat(pa.scalar(descriptor.sequence, pa.int64()), batch.num_rows)
        numbered = pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=READ_SCHEMA)
        return [numbered.slice(at, PAGE_ROWS) for at in range(0, numbered.num_rows, PAGE_ROWS)]

    def raw(self, descriptor: Descriptor) -> bytes | memoryview:
        """The object's bytes, unchecked; ``NotFound`` also for an invalid location, which only damage causes.

        Some implementations list a location unencoded, and store the object under the encoded name.
        """
        stored = stored_as(descriptor.location)
        if stored != descriptor.location:
            with contextlib.suppress(NotFound, InvalidInput):
                return self.store.get(stored).data
        try:
            return self.store.get(descriptor.location).data
        except (NotFound, InvalidInput) as error:
            raise NotFound(
                f"The batch object {self.store.url}/{descriptor.location} is missing (it is listed as batch "
                f"{descriptor.sequence}): restore it, or set the batch aside."
            ) from error


@dataclass(frozen=True, slots=True)
class QueueSpan:
    """One listed batch as a piece of a plan. Picklable: it carries its store's address.

    Its only offset is the batch's sequence. ``size`` is 0 if the store did not list the object.
    """

    store: ObjectStore
    entry: QueueEntry
    size: int

    @property
    def first(self) -> int:
        """The batch's sequence."""
        return self.entry.sequence

    @property
    def next(self) -> int:
        """The next sequence."""
        return self.entry.sequence + 1

    @property
    def fingerprint(self) -> int:
        """Identifies its batch among all that could be listed with its sequence."""
        return self.entry.fingerprint

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole object, and return its records."""
        batches = QueueFetcher(self.store).fetch(self.entry)
        return batches if columns is None else [batch.select(known_columns(columns)) for batch in batches]


SLOT: Final = "queue"
"""The name of a queue's only slot: its consumer."""

_NAMESPACE: Final = UUID("5b0d7a2e-6a55-5c43-9a53-1d2f6f0c7e11")
_PAGE: Final = 512
"""Number of batches whose sizes are requested at a time."""


@checked(name="open")
def open_queue(
    place: Address | ObjectStore,
    *,
    manifest: str = "ingest/manifest",
    data: str = "ingest",
    grace: Duration = GRACE,
    options: Mapping[str, str] | None = None,
    clock: Clock = CLOCK,
    chance: Chance = CHANCE,
) -> QueueLog:
    """Open the queue of version 1 whose manifest and data folder have these paths. Nothing is read or written yet.

    There is nothing to create: a queue without a manifest is empty. ``grace`` is how long collectors wait, and must
    be the same for all producers and collectors of the queue. ``WrongKind`` in a folder of another kind.
    """
    store = store_at(place, options)
    folder = None if isinstance(place, ObjectStore) else local_folder(as_address(place))
    if folder is not None:
        # A log and a queue may share a folder: their names differ.
        check_missing(folder, FolderKind.QUEUE_V1, disk=DISK, beside=(FolderKind.OBJECT_LOG,))
    return QueueLog(store, manifest, data, grace=grace, clock=clock, chance=chance)


@bound_to_process()
@checked
class QueueLog(LogReading):
    """A queue that other implementations share. Satisfies :class:`~strandline.log.contract.Log` as far as it can.

    Its offsets are sequences of batches: all records of a batch have the same one, and a limit of records counts
    batches. It has one slot, which always exists; its holder is known only by number. Writers are recognised
    only while their batches are listed. Picklable, if its store is.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: str,
        data: str,
        *,
        grace: Duration = GRACE,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Use :func:`open_queue`."""
        self.store = store
        self.url = store.url
        self.clock = clock
        self._waiter = HeadPoller()
        self.manifest_path = checked_path(manifest, "manifest")
        self.folder = checked_path(data, "data")
        self.grace = grace
        self._chance = chance
        self._cell = self.new_cell()
        self._holders: dict[str, int] = {}
        self._origin = Origin(f"The queue {self.url}", self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.store, self.manifest_path, self.folder, self.grace))

    def __repr__(self) -> str:
        return f"QueueLog({self.store.url!r}, manifest={self.manifest_path!r}, data={self.folder!r})"

    def new_cell(self) -> ManifestCell:
        """A cell for the manifest, for one more writer."""
        return ManifestCell(self.store, self.manifest_path, clock=self.clock, chance=self._chance)

    @property
    def log_id(self) -> UUID:
        """The identity in cursors. The format has none, so it is derived from the address and the manifest's path.

        All openers of a queue under one address agree on it. A queue that was deleted and created again at the same
        address has the same one, and a copy of a queue elsewhere has another.
        """
        place = self.url.replace("s3a://", "s3://", 1)  # two names for one scheme
        return uuid5(_NAMESPACE, f"{place}/{self.manifest_path}")

    def manifest(self) -> QueueManifest:
        """The manifest as it is now."""
        return self._cell.read()

    def bounds(self) -> Bounds:
        """The first listed and the next sequence."""
        return edits.bounds_of(self.manifest())

    def end(self) -> Cursor:
        """The cursor behind everything that is listed now."""
        manifest = self.manifest()
        return self._cursor_in(manifest, edits.bounds_of(manifest).next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below a sequence, with the fingerprint of the batch there if it is listed."""
        return self._cursor_in(self.manifest(), offset)

    def _cursor_in(self, manifest: QueueManifest, offset: int) -> Cursor:
        if not edits.bounds_of(manifest).first < offset <= edits.bounds_of(manifest).next:
            return Cursor(self.log_id, offset)
        return Cursor(self.log_id, offset, fingerprint=edits.entries_from(manifest, offset - 1)[0].fingerprint)

    def position_of(self, start: Start) -> int:
        """The sequence at which a new consumer with this start begins.

        The manifest has no listing times: a time is compared with that of a batch's metadata or name.
        """
        manifest = self.manifest()

        def listed_since(time: int) -> int | None:
            begun = time - time % MILLISECOND  # times are kept in milliseconds: no batch of the same one is skipped
            return next((entry.sequence for entry in manifest.entries if _time_of(entry) >= begun), None)

        return rules.position_of(start, self.log_id, edits.bounds_of(manifest), listed_since)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[QueueSpan]:
        """The spans to fetch after a cursor; see :class:`~strandline.log.contract.Log`."""
        manifest = self.manifest()
        bounds = edits.bounds_of(manifest)
        rules.check_cursor(since, Cursor(self.log_id, 0), bounds)
        if since.next > bounds.first:
            check_fingerprint(since, edits.entries_from(manifest, since.next - 1)[0])
        entries = edits.entries_from(manifest, since.next)
        if limit.upto is not None:
            entries = entries[: max(0, limit.upto - since.next)]
        spans: list[QueueSpan] = []
        total = 0
        for span in self._sized(entries[: limit.batches][: limit.records]):
            total += span.size
            if spans and not limit.allows(records=0, size=total, batches=0):
                break
            spans.append(span)
        return spans

    def _sized(self, entries: Sequence[QueueEntry]) -> Iterator[QueueSpan]:
        for at in range(0, len(entries), _PAGE):
            page = entries[at : at + _PAGE]
            sizes = self._sizes({entry.location for entry in page})
            for entry in page:
                yield QueueSpan(self.store, entry, sizes.get(entry.location, 0))

    def _sizes(self, locations: set[str]) -> dict[str, int]:
        """Sizes of the objects, which are not in the manifest. Names sort by time, so that one listing gives many."""
        inside = {location for location in locations if location.startswith(f"{self.folder}/")}
        sizes = {}
        if inside:
            last = max(inside)
            for item in self.store.list(f"{self.folder}/", start_after=min(inside)[:-1]):
                if item.path in inside:
                    sizes[item.path] = item.size
                if item.path >= last:
                    break
        for location in locations - inside:
            first = next(iter(self.store.list(location)), None)
            if first is not None and first.path == location:
                sizes[location] = first.size
        return sizes

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the queue reaches past the cursor; polls the manifest with growing pauses."""
        return self._waiter.wait(self, past, timeout, self.clock)

    def _shipper(self, cell: ManifestCell, writer: WriterId, compression: str) -> QueueShipper:
        codec = Compression.named(compression)
        return QueueShipper(self.store, cell, self.folder, writer, codec, self.grace, self.clock)

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId,
        number: int,
        expect: int | None = None,
        compression: str = "zstd",
    ) -> Handle:
        """Append a batch of values, whole or not at all; ``expect`` is a sequence.

        The same writer and number again is a no-op while the batch is listed; after its acknowledgement it is
        not recognised. Numbers need not be in order. Timestamps are not stored: the batch's ingestion time is now.
        """
        now = self.clock.now()
        shipper = self._shipper(self._cell, writer, compression)
        draft = shipper.new_draft()
        draft.add(conform(batch, now=now))
        draft.attach(MetadataRanges((0,), (now - now % shipper.tick,), (b"",)))
        return settled(shipper.ship(draft, number=number, expect=expect))

    def producer(
        self,
        *,
        batch_bytes: int = 64 << 20,
        linger: float = 0.1,
        budget: int = 256 << 20,
        block: bool = True,
        uploads: int = 4,
        compression: str = "zstd",
        value: Codec | None = None,
    ) -> Producer:
        """A producer of values: ``produce``, or ``append`` without key, headers and operation.

        ``value`` is the codec of typed values.
        It always has a new writer id: the queue does not remember the numbers of an old one.
        """
        writer = WriterId(self._chance.uuid())
        shipper = self._shipper(self.new_cell(), writer, compression)
        limits = Limits(batch_bytes, linger, budget, block, uploads)
        values = ValueEncoder(value, partial(named_codec, self))
        return Producer(shipper, limits, writer=writer, number=0, clock=self.clock, values=values)

    @property
    def slots(self) -> QueueSlots:
        """The one slot: the queue's consumer."""
        return QueueSlots(self)

    def claim(self, holder: str) -> int:
        """Become the queue's consumer; returns the epoch, which fences a former one."""
        if self._holders.get(holder) != self.manifest().epoch:
            self._holders[holder] = self._cell.update(edits.claim).epoch
        return self._holders[holder]

    def skip_to(self, position: int) -> QueueManifest:
        """Durably acknowledge everything below a sequence, and fence the consumer."""
        return self._cell.update(lambda manifest: edits.reset(manifest, position))

    def acknowledge(self, through: int, *, epoch: int) -> None:
        """Durably drop everything through a batch; ``Fenced`` unless this is the epoch of the last claim."""
        self._cell.update(lambda manifest: edits.acknowledge(manifest, epoch=epoch, through=through))

    def collector(self, *, remember: bool) -> QueueCollector:
        """The collector of the queue; with ``remember``, over several rounds."""
        return QueueCollector(self.store, self.manifest_path, self.folder, self.grace, self.clock, remember)

    def trim(self, *, dry_run: bool = False, on_progress: Callable[[int], None] | None = None) -> Collection:
        """Delete, in one round, unlisted objects that are older than the grace period; see :mod:`.gc`.

        It has no memory: a batch that was just acknowledged is deleted at once if its object is old enough.
        """
        return self.collector(remember=False).run(dry_run=dry_run, on_progress=on_progress)


@checked
@dataclass(frozen=True, slots=True)
class QueueSlots:
    """The slots of a queue: one, which is always there. Satisfies :class:`~strandline.log.contract.Slots`."""

    log: QueueLog

    def create(self, name: str, position: int, *, lifetime: float | None = None) -> SlotState:
        """Always an error: the one slot is there already, and there can be no other."""
        del lifetime
        rules.check_name(name)
        if name == SLOT:
            raise AlreadyExists(
                f"There is a slot {name!r} already: the queue's own, which cannot be put at {position}."
            )
        raise InvalidInput(
            f"A queue of version 1 has one slot, {SLOT!r}, and cannot have {name!r}: use that one, or copy the queue "
            "into an own log with 'strandline upgrade'."
        )

    def claim(self, name: str, holder: str) -> QueueSlot:
        """Become the queue's consumer; a former one is fenced from now on.

        The format does not say who holds it: that the same holder claims again is seen only by the same object.
        """
        _check_slot(name)
        if not holder:
            raise InvalidInput("A slot's holder needs a name that is unique to one running consumer.")
        return QueueSlot(self.log, holder, self.log.claim(holder))

    def reset(self, name: str, position: int) -> SlotState:
        """Move the slot ahead, which acknowledges everything below; its holder is fenced. It cannot move back."""
        _check_slot(name)
        return _state(self.log.skip_to(position))

    def drop(self, name: str) -> None:
        """Always an error: a queue without its consumer is none."""
        _check_slot(name)
        raise InvalidInput(f"The slot {SLOT!r} of a queue of version 1 cannot be dropped: it is the queue itself.")

    def touch(self, name: str, epoch: int) -> None:
        """Check that nobody else has claimed the queue since."""
        _check_slot(name)
        edits.check_epoch(self.log.manifest(), epoch)

    def flush(self) -> None:
        """Do nothing: positions are written at once."""

    def get(self, name: str) -> SlotState:
        """The one slot; who holds it and when that was last seen is not known."""
        _check_slot(name)
        return _state(self.log.manifest())

    def list(self) -> Sequence[SlotState]:
        """The one slot."""
        return [self.get(SLOT)]

    def floor(self) -> int | None:
        """The first sequence that is not acknowledged."""
        return edits.first_listed(self.log.manifest())


@checked
@dataclass(frozen=True, slots=True)
class QueueSlot:
    """The claimed slot of a queue; see :class:`~strandline.log.contract.Slot`. Advancing acknowledges."""

    log: QueueLog
    holder: str
    epoch: int

    @property
    def name(self) -> str:
        """The slot's name."""
        return SLOT

    def state(self) -> SlotState:
        """What is stored now."""
        return self.log.slots.get(SLOT)

    def advance(self, to: Cursor) -> None:
        """Durably acknowledge everything below a cursor."""
        rules.check_cursor(to, Cursor(self.log.log_id, 0), Bounds(0, self.log.bounds().next))
        if to.next:
            self.log.acknowledge(to.next - 1, epoch=self.epoch)
        else:
            self.touch()

    def touch(self) -> None:
        """Check that no other consumer has claimed the queue; the format has no heartbeat."""
        edits.check_epoch(self.log.manifest(), self.epoch)


def _check_slot(name: str) -> None:
    if rules.check_name(name) != SLOT:
        raise NotFound(f"A queue of version 1 has one slot, {SLOT!r}, and no {name!r}.")


def _state(manifest: QueueManifest) -> SlotState:
    return SlotState(SLOT, edits.first_listed(manifest), holder=None, epoch=manifest.epoch, last_seen=0)


def _time_of(entry: QueueEntry) -> int:
    times = MetadataRanges.of(entry.metadata).times
    return max(times) if times else time_of(entry.location) or 0


def _reopened(store: ObjectStore, manifest: str, data: str, grace: float) -> QueueLog:
    return QueueLog(store, manifest, data, grace=grace)


@checked(name="open")
def open_any(
    place: Address | ObjectStore,
    *,
    format: Literal["queue-v1"] | None = None,  # noqa: A002 - as in Spark
    **settings: Any,
) -> ObjectLog | QueueLog:
    """Open the log at an address, or in a store: an object log, or with ``format="queue-v1"`` a queue of version 1.

    ``create=True`` creates an object log if there is none, with ``retention`` and ``limits``; see
    :func:`~strandline.log.object.log.open_log`. A queue needs no creation: ``manifest`` and ``data`` are the paths of
    its parts; see :func:`~strandline.compat.v1.log.open_queue`. It stays a queue of version 1.

    >>> open_any("memory://doctest-formats", format="queue-v1").bounds()
    Bounds(first=0, next=0)
    """
    return open_log(place, **settings) if format is None else open_queue(place, **settings)
