"""The object log itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.formats.block import Compression
from strandline.formats.head import HeadCodec
from strandline.formats.identity import LogIdentity, SlotCodec, decode_identity, encode_identity
from strandline.log import slots as rules
from strandline.log.contract import Handle
from strandline.log.fetch import fetch_in_order
from strandline.log.object.edits import bounds_of, pin_slot, settle_slot
from strandline.log.object.handles import settled
from strandline.log.object.index import StoredChunks, entries_from
from strandline.log.object.producer import Producer
from strandline.log.object.span import ObjectSpan, plan_spans
from strandline.log.object.upload import Draft, Lister, seal
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit
from strandline.model.errors import (
    AlreadyExists,
    CorruptData,
    Fenced,
    InvalidInput,
    NotALog,
    NotFound,
    NotReady,
    TransientStorageError,
)
from strandline.model.head import Head, WriterId
from strandline.model.records import RecordSource, conform
from strandline.model.slots import SlotState
from strandline.model.stamp import OpId
from strandline.storage.ambient import CHANCE, CLOCK, Chance, Clock
from strandline.storage.cell import StoreCell
from strandline.storage.store import ABSENT, ObjectStore
from strandline.storage.urls import open_store

_IDENTITY: Final = "log.json"
_FIRST_POLL: Final = 0.005
_LAST_POLL: Final = 0.25
_PLANNED: Final = 64


def open_log(
    place: str | ObjectStore,
    *,
    create: bool = False,
    options: Mapping[str, str] | None = None,
    clock: Clock = CLOCK,
    chance: Chance = CHANCE,
) -> ObjectLog:
    """Open the log at an address, or in a store; ``create`` makes it if there is none.

    ``NotALog`` if there is none, ``UnsupportedVersion`` if it is newer than this program. Opening writes nothing
    unless it creates.
    """
    store = open_store(place, options) if isinstance(place, str) else place
    try:
        found = store.get(_IDENTITY)
    except NotFound as error:
        if not create:
            raise NotALog(
                f"There is no log at {store.url}: check the address, or create one with open(..., create=True)."
            ) from error
        identity = _create(store, clock, chance)
    else:
        identity = decode_identity(found.data, f"{store.url}/{_IDENTITY}")
    return ObjectLog(store, identity, clock=clock, chance=chance)


def _create(store: ObjectStore, clock: Clock, chance: Chance) -> LogIdentity:
    # The head first: whoever finds an identity may rely on a head, and an absent head is then damage, not newness.
    cell: StoreCell[Head] = StoreCell(store, "head", HeadCodec(), clock=clock, chance=chance)
    try:
        head = cell.create(OpId(chance.uuid()), Head(chance.uuid()))
    except AlreadyExists:
        head = cell.read().value
    identity = LogIdentity(head.log_id)
    try:
        store.put_if(_IDENTITY, encode_identity(identity), ABSENT)
    except (AlreadyExists, TransientStorageError) as error:
        try:
            found = store.get(_IDENTITY)
        except NotFound:
            raise error from None
        return decode_identity(found.data, f"{store.url}/{_IDENTITY}")
    return identity


class ObjectLog:
    """A log in an object store. Satisfies :class:`~strandline.log.contract.Log`; picklable, if its store is."""

    def __init__(
        self, store: ObjectStore, identity: LogIdentity, *, clock: Clock = CLOCK, chance: Chance = CHANCE
    ) -> None:
        """Use :func:`open_log`."""
        self._store = store
        self._identity = identity
        self._clock = clock
        self._chance = chance
        self._lister = self._new_lister()
        self._chunks = StoredChunks(store)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ObjectLog, (self._store, self._identity))

    def __repr__(self) -> str:
        return f"ObjectLog({self._store.url!r}, log_id={self.log_id})"

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._identity.log_id

    @property
    def url(self) -> str:
        """Where the log is."""
        return self._store.url

    @property
    def identity(self) -> LogIdentity:
        """What ``log.json`` says."""
        return self._identity

    # --- reading -----------------------------------------------------------------------------------------------

    def head(self) -> Head:
        """The head as it is now."""
        try:
            head = self._lister.cell.read().value
        except NotFound as error:
            raise CorruptData(
                f"{self.url}/head is missing although the log exists: restore the object before anything else."
            ) from error
        if head.log_id != self.log_id:
            raise CorruptData(f"{self.url}/head belongs to log {head.log_id}, not to {self.log_id}: restore it.")
        return head

    def bounds(self) -> Bounds:
        """The first retained and the next offset."""
        return bounds_of(self.head())

    def start(self) -> Cursor:
        """The cursor before everything that is retained."""
        return Cursor(self.log_id, self.bounds().first)

    def end(self) -> Cursor:
        """The cursor behind everything that is listed now."""
        return Cursor(self.log_id, self.bounds().next)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[ObjectSpan]:
        """What to fetch after a cursor; see :class:`~strandline.log.contract.Log`."""
        head = self.head()
        rules.check_cursor(since, Cursor(self.log_id, 0), bounds_of(head))
        return plan_spans(self._store, entries_from(head, since.next, self._chunks), since.next, limit)

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until the log reaches past the cursor, by looking at the head ever more rarely."""
        deadline = self._clock.monotonic() + timeout
        pause = _FIRST_POLL
        while self.bounds().next <= past.next:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            self._clock.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_POLL)
        return True

    def read(
        self, since: Cursor | None = None, *, upto: int | None = None, columns: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Arrow batches with offsets, in order, from a cursor (or the beginning) to the end as of this call."""
        cursor = self.start() if since is None else since
        end = self.bounds().next if upto is None else upto
        while cursor.next < end:
            spans = self.plan(cursor, Limit(batches=_PLANNED, upto=end))
            if not spans:
                raise NotReady(f"{self.url} does not reach offset {end} yet; it ends at {cursor.next}.")
            for _, batches in fetch_in_order(spans, columns=columns):
                yield from batches
            cursor = cursor.at(spans[-1].next)

    # --- appending ---------------------------------------------------------------------------------------------

    def _new_lister(self) -> Lister:
        return Lister(self._store, self.log_id, clock=self._clock, chance=self._chance)

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId,
        number: int,
        expect: int | None = None,
        compression: str = "lz4",
    ) -> Handle:
        """Append a batch, whole or not at all; repeating it with the same writer and number is a no-op."""
        if number < 0:
            raise InvalidInput(f"A writer's numbers begin at 0, not {number}.")
        draft = Draft(Compression.named(compression))
        draft.add(conform(batch, now=self._clock.now()))
        head = self.head()
        born = head.next_sequence if number == 0 and writer not in head.writers else 0
        lister = self._lister
        sealed = seal(draft, writer=writer, number=number, born=born, expect=expect)
        return settled(lister.enlist([lister.upload(sealed, head.generation)])[0])

    def producer(
        self,
        *,
        writer: WriterId | None = None,
        batch_bytes: int = 64 << 20,
        linger: float = 0.1,
        budget: int = 256 << 20,
        block: bool = True,
        uploads: int = 4,
        compression: str = "lz4",
    ) -> Producer:
        """A producer with a writer id of its own, or the given one, which then goes on behind its last number.

        A writer id is for one running producer at a time: two that share one would take each other's batches for
        repetitions of their own.
        """
        head = self.head()
        name = WriterId(self._chance.uuid()) if writer is None else writer
        last = head.writers.get(name)
        return Producer(
            self._new_lister(),
            writer=name,
            born=head.next_sequence,
            number=0 if last is None else last.number + 1,
            generation=head.generation,
            clock=self._clock,
            batch_bytes=batch_bytes,
            linger=linger,
            budget=budget,
            block=block,
            uploads=uploads,
            compression=compression,
        )

    # --- slots -------------------------------------------------------------------------------------------------

    def _slot_cell(self, name: str) -> StoreCell[SlotState]:
        path = f"slots/{rules.check_name(name)}.json"
        return StoreCell(self._store, path, SlotCodec(), clock=self._clock, chance=self._chance)

    def create_slot(self, name: str, position: int) -> SlotState:
        """Create a slot that pins everything from ``position`` on."""
        cell = self._slot_cell(name)
        op = OpId(self._chance.uuid())
        try:
            self._lister.cell.update(op, lambda head: pin_slot(head, name, position))
        except AlreadyExists:
            pending = self.head().slots.get(name)
            if pending is None or _exists(cell):
                raise
        else:
            pending = position
        # If it was pinned already, someone died between the pin and the cell: finish what was pinned.
        created = cell.create(op, SlotState(name, pending, holder=None, epoch=0, last_seen=self._clock.now()))
        self._settle(name)
        if pending != position:
            raise AlreadyExists(f"There is a slot {name!r} already, at {pending}; its creation was just finished.")
        return created

    def _settle(self, name: str) -> None:
        op = OpId(self._chance.uuid())
        self._lister.cell.update(op, lambda head: settle_slot(head, name))

    def claim_slot(self, name: str, holder: str) -> ObjectSlot:
        """Become the slot's holder; a former holder is fenced from now on."""
        cell = self._slot_cell(name)
        op = OpId(self._chance.uuid())
        try:
            state = cell.update(op, lambda slot: rules.claim(slot, holder, self._clock.now()))
        except NotFound as error:
            raise NotFound(f"There is no slot {name!r} in {self.url}: create it first.") from error
        if state.holder != holder:
            # Our answer was lost, and when we looked again someone had claimed the slot after us: the epoch is theirs.
            raise Fenced(f"Slot {name!r} was claimed by {state.holder!r} (epoch {state.epoch}) at the same time.")
        if self.head().slots.get(name) is not None:
            self._settle(name)  # its creator died before it could
        return ObjectSlot(self, cell, name, holder, state.epoch)

    def slot(self, name: str) -> SlotState:
        """One slot's state, or ``NotFound``."""
        return self._slot_cell(name).read().value

    def slots(self) -> list[SlotState]:
        """All slots whose cells are written, by name."""
        return self._members(self.head())[0]

    def floor(self) -> int | None:
        """The lowest position that a valid slot, or one being created, still needs."""
        states, pending = self._members(self.head())
        return rules.floor(states, pending)

    def _members(self, head: Head) -> tuple[list[SlotState], list[int]]:
        states, pending = [], []
        for name, position in sorted(head.slots.items()):
            if position is not None:
                pending.append(position)
            try:
                states.append(self.slot(name))
            except NotFound as error:
                if position is None:
                    raise CorruptData(
                        f"{self.url}/slots/{name}.json is missing although the head names it: restore the object."
                    ) from error
        return states, pending


@dataclass(frozen=True, slots=True)
class ObjectSlot:
    """A claimed slot of an object log; see :class:`~strandline.log.contract.Slot`."""

    log: ObjectLog
    cell: StoreCell[SlotState]
    name: str
    holder: str
    epoch: int

    def state(self) -> SlotState:
        """What is stored now."""
        return self.cell.read().value

    def advance(self, to: Cursor) -> None:
        """Durably move the position up."""
        bounds = self.log.bounds()
        rules.check_cursor(to, Cursor(self.log.log_id, 0), Bounds(0, bounds.next))
        clock, op = self.log._clock, OpId(self.log._chance.uuid())  # noqa: SLF001 - the same module
        self.cell.update(op, lambda slot: rules.advance(slot, epoch=self.epoch, to=to.next, now=clock.now()))


def _exists(cell: StoreCell[SlotState]) -> bool:
    try:
        cell.read()
    except NotFound:
        return False
    return True
