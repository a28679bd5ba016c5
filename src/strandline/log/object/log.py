"""The object log, and its span: a range of offsets in one batch object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    AlreadyExists,
    CorruptData,
    Diverged,
    InvalidInput,
    NotALog,
    NotFound,
    TransientStorageError,
)
from strandline.formats.arrow.block import Compression
from strandline.formats.json.value_versions import ValueVersion
from strandline.formats.object.batch import decode_batch
from strandline.formats.object.head import HeadCodec
from strandline.formats.object.identity import IdentityCodec, LogIdentity, decode_identity, encode_identity
from strandline.log.contract import Handle, Settled
from strandline.log.folders import FolderKind, check_missing, check_new, check_new_in_store
from strandline.log.object.head.edits import bounds_of, refuse_if_sealed
from strandline.log.object.head.head_log import HeadLog
from strandline.log.object.head.index import StoredChunks
from strandline.log.object.maintain.trimmer import GRACE, Trimmer, TrimResult
from strandline.log.object.slots import Hold, HoldSeconds, SlotKeeper
from strandline.log.object.upload import Lister, ObjectShipper
from strandline.log.produce.appending import Produces, Shipping
from strandline.log.produce.shipper import Limits
from strandline.log.read.planning import clipped, known_columns
from strandline.log.read.reading import HeadPoller
from strandline.model.addresses import Address, ParsedAddress
from strandline.model.arguments import Timeout, checked
from strandline.model.content_type import check_content_type, check_same
from strandline.model.cursor import Cursor, RecordRange
from strandline.model.head import Entry, Head, WriterId
from strandline.model.records import RecordSource, conform, with_offsets
from strandline.model.retention import FOREVER, NO_LIMITS, Retention, SlotLimits, as_retention, default_limits
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.closing import Closing
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.metrics import fetching
from strandline.storage.objects.store import ABSENT, ObjectStore
from strandline.storage.objects.urls import store_at
from strandline.values.contract import Codec
from strandline.values.recorded import check_recorded, newest, with_version


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """Offsets ``first`` up to ``next`` of one listed batch. Picklable: it carries its store's address."""

    store: ObjectStore
    entry: Entry
    first: int
    next: int

    def __reduce__(self) -> tuple[type[ObjectSpan], tuple[Any, ...]]:
        return ObjectSpan, (self.store, self.entry, self.first, self.next)

    @property
    def size(self) -> int:
        """The bytes of the batch object."""
        return self.entry.size

    @property
    def fingerprint(self) -> int:
        """Identifies the batch among all that could be listed there."""
        return self.entry.fingerprint

    def record_range(self) -> RecordRange:
        """The timestamps of the batch."""
        return RecordRange(self.entry.oldest, self.entry.newest)

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole object, and return the span's records with their offsets."""
        with fetching() as count:
            batches = self._read()
            count(self.entry.count, self.entry.size)
        numbered = clipped(with_offsets(batches, self.entry.first), self.first, self.next)
        return numbered if columns is None else [batch.select(known_columns(columns)) for batch in numbered]

    def _read(self) -> list[pa.RecordBatch]:
        where = f"{self.store.url}/{self.entry.location}"
        held = f"it is listed as offsets {self.entry.first} to {self.entry.next - 1}"
        try:
            data = self.store.get(self.entry.location).data
        except NotFound as error:
            raise NotFound(
                f"The batch object {where} is missing ({held}): restore it, or bootstrap the consumer past it."
            ) from error
        if len(data) != self.entry.size:  # before its end is decoded, which may then be anything
            raise CorruptData(
                f"{where} is damaged: it has {len(data)} bytes and was listed with {self.entry.size} ({held}). "
                "Restore the object."
            )
        info, batches = decode_batch(data, where)
        if (info.count, info.writer, info.number) != (self.entry.count, self.entry.writer, self.entry.number):
            raise CorruptData(f"{where} holds another batch than the one listed ({held}). Restore the object.")
        return batches


IDENTITY: Final = "log.json"


@checked
def open_log(
    address: Address | ObjectStore,
    *,
    create: bool = False,
    retention: str | Retention | None = None,
    limits: SlotLimits | None = None,
    value: Codec | None = None,
    content_type: str | None = None,
    options: Mapping[str, str] | None = None,
    env: Env = SYSTEM,
) -> ObjectLog:
    """Open the log at an address, or in a store; ``create`` creates it if there is none.

    A new log keeps everything, unless ``retention`` says otherwise: ``"consumed"`` (a queue), ``"age:7d"``,
    ``"bytes:100GiB"``; ``limits`` are those of its slots. An existing log keeps its own; passing different ones
    is :class:`InvalidInput`: use :meth:`ObjectLog.set_retention`. ``value`` is the codec of its values, which a new log
    records; an existing log has to have recorded it, in this version or an older one. ``content_type`` is the media
    type of its values, which never changes.

    ``NotALog`` if there is none, ``UnsupportedVersion`` if it is newer than this program. Opening writes nothing
    unless it creates.
    """
    policy = None if retention is None else as_retention(retention)
    if limits is None and policy is not None:
        limits = default_limits(policy)
    content_type = None if content_type is None else check_content_type(content_type)
    store = store_at(address, options)
    try:
        found = store.get(IDENTITY)
    except NotFound as error:
        folder = None if isinstance(address, ObjectStore) else ParsedAddress.of(address).folder
        if folder is not None:
            (check_new if create else check_missing)(folder, FolderKind.OBJECT_LOG, disk=DISK)
        elif create:
            check_new_in_store(store, FolderKind.OBJECT_LOG)
        with suppress(NotFound):
            HeadCodec().decode(store.get("head").data, f"{store.url}/head")  # refuses one that is being deleted
        if not create and any(item.path == "head" for item in store.list("head")):
            raise NotALog(
                f"{store.url}/{IDENTITY} is missing although the head of a log is there: restore the object; or, if "
                "it is lost, let 'strandline create' write it again for the same log, with the same retention."
            ) from error
        if not create:
            raise NotALog(
                f"There is no log at {store.url}: check the address, or create one: open it with create, or use "
                "'strandline create'."
            ) from error
        values = () if value is None else with_version((), value, store.url)
        wanted = LogIdentity(
            UUID(int=0), retention=policy or FOREVER, limits=limits or NO_LIMITS, content_type=content_type
        )
        identity = _create(store, _with_values(wanted, values), env)
    else:
        identity = decode_identity(found.data, f"{store.url}/{IDENTITY}")
    if policy not in (None, identity.retention) or limits not in (None, identity.limits):
        raise InvalidInput(
            f"The log at {store.url} keeps {identity.retention} with {identity.limits}; opening does not change that: "
            "use set_retention, or open it without these arguments."
        )
    check_recorded(identity.values, value, store.url)
    check_same(identity.content_type, content_type, store.url)
    return ObjectLog(store, identity, env=env)


def _create(store: ObjectStore, wanted: LogIdentity, env: Env) -> LogIdentity:
    # The head first: where there is an identity there is a head, so that a missing head is damage.
    cell: StoreCell[Head] = StoreCell(store, "head", HeadCodec(), env=env)
    try:
        head = cell.create(OpId(env.chance.uuid()), Head(env.chance.uuid()))
    except AlreadyExists:
        head = cell.read().value
    identity = replace(wanted, log_id=head.log_id)
    try:
        store.put_if(IDENTITY, encode_identity(identity), ABSENT)
    except (AlreadyExists, TransientStorageError) as error:
        try:
            found = store.get(IDENTITY)
        except NotFound:
            raise error from None
        return decode_identity(found.data, f"{store.url}/{IDENTITY}")
    return identity


def _with_values(identity: LogIdentity, values: tuple[ValueVersion, ...]) -> LogIdentity:
    name = values[-1].format if values else identity.value_format
    return replace(identity, values=values, value_format=name)


@bound_to_process(keep=("log_id",))
@checked
class ObjectLog(HeadLog[ObjectSpan], Produces, Closing):
    """A log in an object store. Satisfies :class:`~strandline.log.contract.Log`; picklable, if its store is."""

    _limits = Limits()

    def __init__(self, store: ObjectStore, identity: LogIdentity, *, env: Env = SYSTEM) -> None:
        """Use :func:`open_log`."""
        self.store = store
        self.url = store.url
        self.identity = identity
        """The content of ``log.json``."""
        self.env = env
        self._lister = self._new_lister()
        self.chunks = StoredChunks(store)
        self._waiter = HeadPoller()
        self._origin = Origin(f"The log {store.url}", self)
        self.slots = SlotKeeper(store, self._lister.cell, self.head, self.chunks, env, self._origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ObjectLog, (self.store, self.identity))

    def close(self) -> None:
        """Does nothing. A log with a cold tier has something to close, so both kinds have this method."""

    def __repr__(self) -> str:
        return f"ObjectLog({self.store.url!r}, log_id={self.log_id})"

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self.identity.log_id

    @property
    def content_type(self) -> str | None:
        """The media type of the values, as recorded when the log was created; None: unspecified."""
        return self.identity.content_type

    def head(self) -> Head:
        """The head as it is now."""
        return self._lister.cell.read().value

    def _span(self, entry: Entry, first: int, end: int) -> ObjectSpan:
        return ObjectSpan(self.store, entry, first, end)

    def ended(self, at: int) -> bool:
        """Whether the log was sealed at an offset or below, as of the head that was read last."""
        held = self._lister.cell.held
        return bounds_of(self.head() if held is None else held).ended(at)

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the log reaches past the cursor; polls the head with growing pauses."""
        return self._waiter.wait(self.bounds, past, timeout, self.env.clock)

    def _new_lister(self) -> Lister:
        return Lister(self.store, self.log_id, env=self.env)

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId,
        number: int,
        expect: int | None = None,
        seal: bool = False,
        compression: str = "lz4",
    ) -> Handle:
        """Append a batch, whole or not at all; repeating it with the same writer and number is a no-op."""
        codec, batches = Compression.named(compression), conform(batch, now=self.env.clock.now())
        head = self.head()
        refuse_if_sealed(head, writer, number)  # before anything is uploaded
        born = head.next_sequence if number == 0 and writer not in head.writers else 0
        shipper = ObjectShipper(self._lister, writer=writer, born=born, compression=codec, seals=seal)
        draft = shipper.new_draft()
        draft.add(batches)
        return Settled(shipper.ship(draft, number=number, expect=expect))

    def seal(self) -> Cursor:
        """Durably end the log, and return the cursor of its end: no record is ever appended there. Idempotent."""
        head = self._lister.seal()
        return self._cursor_in(head, head.next_offset)

    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        head = self.head()
        name = WriterId(self.env.chance.uuid()) if writer is None else writer
        last = head.writers.get(name)
        codec = Compression.named(compression or "lz4")
        shipper = ObjectShipper(self._new_lister(), writer=name, born=head.next_sequence, compression=codec, sole=True)
        return Shipping(shipper, name, 0 if last is None else last.number + 1, self.env)

    def hold(self, position: int, seconds: HoldSeconds, *, retained_from: int | None = None) -> Hold:
        """Pin everything from ``position`` on for some time: an expiring slot, for a reader that stores nothing."""
        return self.slots.hold(position, seconds, retained_from=retained_from)

    def slot_limits(self) -> SlotLimits:
        """The limits of slots, as stored now."""
        return self._read_identity().limits

    def set_retention(self, retention: str | Retention, limits: SlotLimits | None = None) -> None:
        """Durably change the retention policy; the next trim applies it."""
        policy = as_retention(retention)
        within = default_limits(policy) if limits is None else limits
        self._edit_identity(lambda identity: replace(identity, retention=policy, limits=within))

    @property
    def value(self) -> Codec | None:
        """The codec of the log's values, in its newest version, as stored now; None if values are plain bytes.

        ``UnsupportedVersion`` for a format of a newer release: its values can still be read as bytes.
        """
        return newest(self._read_identity().values, self.url)

    @property
    def value_versions(self) -> tuple[ValueVersion, ...]:
        """All versions of the value format, as stored now; none if values are plain bytes."""
        return self._read_identity().values

    def evolve_value(self, value: Codec) -> Codec:
        """Durably record a new version of the value format; returns its codec. The same version again changes nothing.

        New fields are allowed, and fields that become wider: the new version decodes all older values. Anything
        else is ``SchemaRefused``. On a log of plain bytes it records the first version, and the caller vouches that
        the values so far have that format.
        """
        self._edit_identity(lambda identity: _with_values(identity, with_version(identity.values, value, self.url)))
        return value

    def _edit_identity(self, edit: Callable[[LogIdentity], LogIdentity]) -> None:
        """Change ``log.json`` by compare-and-set; ``edit`` is pure, and gives the same again once it was applied."""

        def edited(stored: LogIdentity) -> LogIdentity:
            if stored.log_id != self.log_id:
                raise Diverged(f"{self.url} is log {stored.log_id} now, and was log {self.log_id}: open it again.")
            wanted = edit(stored)
            return stored if wanted == stored else wanted

        cell = StoreCell(self.store, IDENTITY, IdentityCodec(), env=self.env)
        self.identity = cell.update(OpId(self.env.chance.uuid()), edited)

    def trim(
        self,
        *,
        grace: float = GRACE,
        pause: float = 0.0,
        dry_run: bool = False,
        everything: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> TrimResult:
        """Invalidate slots that break a limit, trim as retention and slots allow, and delete unneeded objects.

        Trimmed objects are deleted ``grace`` seconds later, by a later call. Safe at any time, from any number of
        processes; the next call finishes what a killed one left. Does nothing if a round began within the last
        ``pause`` seconds, so that many background trimmers do no more than one. A dry run changes nothing and reports
        what would be done.
        """
        trimmer = Trimmer(self.slots, self._read_identity, grace)
        return trimmer.run(pause=pause, dry_run=dry_run, everything=everything, on_progress=on_progress)

    def _read_identity(self) -> LogIdentity:
        self.identity = decode_identity(self.store.get(IDENTITY).data, f"{self.url}/{IDENTITY}")
        return self.identity
