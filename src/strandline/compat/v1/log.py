"""A version 1 queue with the API of a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, NoReturn, TypeAlias
from uuid import UUID, uuid5

from strandline.compat.v1 import edits
from strandline.compat.v1.edits import checked_path, time_of
from strandline.compat.v1.neighbours import Neighbours
from strandline.compat.v1.reading import QueueSpan, sized_spans
from strandline.compat.v1.shipper import ManifestCell, QueueShipper
from strandline.compat.v1.slots import QueueSlots
from strandline.compat.v1.trimming import GRACE, QueueTrimmer, QueueTrimResult
from strandline.errors import InvalidInput, Unsupported
from strandline.formats.arrow.block import Compression
from strandline.log.contract import Handle, LogReading, Settled
from strandline.log.folders import FolderKind, check_missing
from strandline.log.produce.appending import Produces, Shipping
from strandline.log.produce.shipper import Limits
from strandline.log.read.planning import check_fingerprint
from strandline.log.read.reading import HeadPoller
from strandline.log.read.value_format import WithoutFormat
from strandline.log.slots import resume
from strandline.model.addresses import Address, ParsedAddress
from strandline.model.arguments import Duration, Timeout, checked
from strandline.model.cursor import MILLISECOND, NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import MetadataRanges, QueueEntry, QueueManifest, WriterId
from strandline.model.records import RecordSource, conform
from strandline.storage.closing import Closing
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import store_at

_NAMESPACE: Final = UUID("5b0d7a2e-6a55-5c43-9a53-1d2f6f0c7e11")


@checked
@dataclass(frozen=True, slots=True)
class QueueFormat:
    """Where a queue of version 1 has its parts, below its address.

    ``grace`` is how many seconds its trimmers wait: the same for all of its producers and trimmers.
    """

    manifest: str = "ingest/manifest"
    data: str = "ingest"
    grace: Duration = GRACE


NamedFormat: TypeAlias = Literal["queue-v1"] | QueueFormat
"""A format by its name, or with the places of its parts."""


def open_format(address: Address | ObjectStore, form: NamedFormat, **settings: Any) -> QueueLog:
    """The queue at an address, with its parts in their usual places if only the format is named."""
    return open_queue(address, **asdict(QueueFormat() if isinstance(form, str) else form), **settings)


@checked
def open_queue(
    address: Address | ObjectStore,
    *,
    manifest: str = "ingest/manifest",
    data: str = "ingest",
    grace: Duration = GRACE,
    options: Mapping[str, str] | None = None,
    env: Env = SYSTEM,
) -> QueueLog:
    """Open the queue of version 1 whose manifest and data folder have these paths. Nothing is read or written yet.

    There is nothing to create: a queue without a manifest is empty. ``grace`` is how long trimmers wait, and must
    be the same for all producers and trimmers of the queue. ``WrongKind`` in a folder of another kind.
    """
    store = store_at(address, options)
    folder = None if isinstance(address, ObjectStore) else ParsedAddress.of(address).folder
    if folder is not None:
        # A log and a queue may share a folder: their names differ.
        check_missing(folder, FolderKind.QUEUE_V1, disk=DISK, beside=(FolderKind.OBJECT_LOG,))
    return QueueLog(store, manifest, data, grace=grace, env=env)


@bound_to_process()
@checked
class QueueLog(WithoutFormat, Produces, LogReading, Closing):
    """A queue that other implementations share. Satisfies :class:`~strandline.log.contract.Log` as far as it can.

    Its offsets are sequences of batches: all records of a batch have the same one, and a limit of records counts
    batches. It has one slot, which always exists; its holder is known only by number. Writers are recognised
    only while their batches are listed. Picklable, if its store is.
    """

    _limits = Limits()

    def __init__(
        self, store: ObjectStore, manifest: str, data: str, *, grace: Duration = GRACE, env: Env = SYSTEM
    ) -> None:
        """Use :func:`open_queue`."""
        self.store = store
        self.url = store.url
        self.env = env
        self._waiter = HeadPoller()
        self.manifest_path = checked_path(manifest, "manifest")
        self.folder = checked_path(data, "data")
        self.grace = grace
        self._cell = self.new_cell()
        self._origin = Origin(f"The queue {self.url}", self)
        self._slots = QueueSlots(self.log_id, self._cell, {}, self._origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(QueueLog, grace=self.grace), (self.store, self.manifest_path, self.folder))

    def __repr__(self) -> str:
        return f"QueueLog({self.store.url!r}, manifest={self.manifest_path!r}, data={self.folder!r})"

    def close(self) -> None:
        """Does nothing: there is nothing to close. Other logs have something to close, so all have this method."""

    @property
    def counts_batches(self) -> bool:
        """True: all records of a batch have its sequence as their offset."""
        return True

    def new_cell(self) -> ManifestCell:
        """A cell for the manifest, for one more writer."""
        register = Neighbours(self.store, self.manifest_path, self.folder).register
        return ManifestCell(self.store, self.manifest_path, env=self.env, register=register)

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
        """The cursor after everything that is listed now."""
        manifest = self.manifest()
        return self._cursor_in(manifest, edits.bounds_of(manifest).next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor after everything below a sequence, with the fingerprint of the batch there if it is listed."""
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

        def time_in(entry: QueueEntry) -> int:
            times = MetadataRanges.of(entry.metadata).times
            return max(times) if times else time_of(entry.location) or 0

        def listed_since(time: int) -> int | None:
            begun = time - time % MILLISECOND  # times are kept in milliseconds: no batch of the same one is skipped
            return next((entry.sequence for entry in manifest.entries if time_in(entry) >= begun), None)

        return resume.position_of(start, self.log_id, edits.bounds_of(manifest), listed_since)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[QueueSpan]:
        """The spans to fetch after a cursor; see :class:`~strandline.log.contract.Log`."""
        manifest = self.manifest()
        bounds = edits.bounds_of(manifest)
        resume.check_cursor(since, Cursor(self.log_id, 0), bounds)
        if since.next > bounds.first:
            check_fingerprint(since, edits.entries_from(manifest, since.next - 1)[0])
        entries = edits.entries_from(manifest, since.next)
        if limit.upto is not None:
            entries = entries[: max(0, limit.upto - since.next)]
        spans: list[QueueSpan] = []
        total = 0
        for span in sized_spans(self.store, self.folder, entries[: limit.batches][: limit.records]):
            total += span.size
            if spans and not limit.allows(records=0, size=total, batches=0):
                break
            spans.append(span)
        return spans

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the queue reaches past the cursor; polls the manifest with growing pauses."""
        return self._waiter.wait(self.bounds, past, timeout, self.env.clock)

    def ended(self, at: int) -> bool:
        """False: its format has no place for a seal. Costs no request."""
        return False

    def _shipper(self, cell: ManifestCell, writer: WriterId, compression: str) -> QueueShipper:
        codec = Compression.named(compression)
        return QueueShipper(self.store, cell, self.folder, writer, codec, self.grace, self.env)

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId,
        number: int,
        expect: int | None = None,
        seal: bool = False,
        compression: str = "zstd",
    ) -> Handle:
        """Append a batch of values, whole or not at all; ``expect`` is a sequence.

        The same writer and number again is a no-op while the batch is listed; after its acknowledgement it is
        not recognised. Numbers need not be in order. Timestamps are not stored: the batch's ingestion time is now.
        """
        if seal:
            self.seal()
        now = self.env.clock.now()
        shipper = self._shipper(self._cell, writer, compression)
        draft = shipper.new_draft()
        draft.add(conform(batch, now=now))
        draft.attach(MetadataRanges((0,), (now - now % shipper.tick,), (b"",)))
        return Settled(shipper.ship(draft, number=number, expect=expect))

    def seal(self) -> NoReturn:
        """``Unsupported``: its format has no place for it."""
        raise Unsupported(
            f"The queue at {self.url} is of version 1, which cannot be sealed: nothing was changed. Copy it into a log "
            "('strandline upgrade'), and seal that."
        )

    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        if writer is not None:
            raise InvalidInput("A queue of version 1 remembers no number of a former writer: leave the writer out.")
        name = WriterId(self.env.chance.uuid())
        return Shipping(self._shipper(self.new_cell(), name, compression or "zstd"), name, 0, self.env)

    @property
    def slots(self) -> QueueSlots:
        """The one slot: the queue's consumer."""
        return self._slots

    def trimmer(self, *, remember: bool) -> QueueTrimmer:
        """The trimmer of the queue; with ``remember``, over several rounds."""
        return QueueTrimmer(self.store, self.manifest_path, self.folder, self.grace, self.env, remember)

    def trim(self, *, dry_run: bool = False, on_progress: Callable[[int], None] | None = None) -> QueueTrimResult:
        """Delete, in one round, unlisted batches that are older than the grace period; see :mod:`.trimming`.

        It has no memory: a batch that was just acknowledged is deleted at once if its object is old enough.
        """
        return self.trimmer(remember=False).run(dry_run=dry_run, on_progress=on_progress)
