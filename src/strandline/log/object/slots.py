"""Slots of an object log: one cell per slot; membership and pending positions are in the head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final, Self, TypeVar

from strandline.errors import AlreadyExists, Contended, CorruptData, Fenced, NotFound, SlotInvalid
from strandline.formats.object.identity import SlotCodec
from strandline.log.object.head.edits import bounds_of, pin_slot, repin_slot, settle_slot, unlist_slot
from strandline.log.object.head.index import Chunks, entries_from
from strandline.log.read.planning import entries_after
from strandline.log.slots import resume, rules, trimming
from strandline.model.arguments import checked, seconds
from strandline.model.cursor import SECOND, Bounds, Cursor
from strandline.model.head import Head, Pin
from strandline.model.retention import HOLDS, SlotState
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.store import ObjectStore

T = TypeVar("T")

_FOLDER: Final = "slots/"
_RESETS: Final = 8
"""How often a reset is repeated because the slot moved meanwhile."""

HoldSeconds = Annotated[float, seconds(most=100 * 366 * 86400, above=0)]
"""Seconds of a hold, which is for one read operation; its end must fit the times of a slot."""

_NOT_LISTED: Final = Pin(0, 0)


@dataclass(frozen=True, slots=True)
class Members:
    """The slots of a log as read: those with a cell, and the pins of those that are being created or moved."""

    membership: int
    states: list[SlotState]
    pending: list[int]


@bound_to_process(close=())
@checked
@dataclass(frozen=True, slots=True)
class SlotKeeper:
    """The slots of an object log. Satisfies :class:`~strandline.log.contract.Slots`."""

    store: ObjectStore
    head: StoreCell[Head]
    read_head: Callable[[], Head]
    """Reads the head, and checks that it is this log's."""
    chunks: Chunks
    env: Env
    _origin: Origin

    def cell(self, name: str) -> StoreCell[SlotState]:
        """The cell of one slot."""
        path = f"{_FOLDER}{rules.check_name(name)}.json"
        return StoreCell(self.store, path, SlotCodec(name), env=self.env)

    def op(self) -> OpId:
        """A new operation on a cell."""
        return OpId(self.env.chance.uuid())

    def members(self, head: Head) -> Members:
        """All slots that a head names, by name. A listed slot without a cell is damage, unless it is pinned."""
        states = []
        for name, pin in sorted(head.slots.items()):
            try:
                state = self.cell(name).read().value
                if not state.dropped:  # else the cell is of a former slot, and this one is being created
                    states.append(state)
            except NotFound as error:
                # It is being created, or was dropped since the head was read; otherwise its cell must exist.
                if pin is None and self.read_head().slots.get(name, _NOT_LISTED) is None:
                    raise self._lost(name) from error
        return Members(head.membership, states, trimming.pending_positions(head.slots.values()))

    def get(self, name: str) -> SlotState:
        """One slot's state, or ``NotFound``; ``CorruptData`` if its object is missing and the head names it."""
        state = self.read(self.cell(name), name)
        if state.dropped:
            raise self._absent(name)
        return state

    def read(self, cell: StoreCell[SlotState], name: str) -> SlotState:
        """The state in a slot's cell; raises as :meth:`get` does."""
        return self._explained(name, lambda: cell.read().value)

    def _explained(self, name: str, act: Callable[[], T]) -> T:
        """Do something with the cell of a slot; if it is missing, say why."""
        try:
            return act()
        except NotFound as error:
            if self.read_head().slots.get(name, _NOT_LISTED) is not None:
                raise self._absent(name) from error
        try:
            return act()  # the cell is written before the head says so: its creation was finished meanwhile
        except NotFound as error:
            if self.read_head().slots.get(name, _NOT_LISTED) is not None:
                raise self._absent(name) from error
            raise self._lost(name) from error

    def _absent(self, name: str) -> NotFound:
        return NotFound(f"There is no slot {name!r} in {self.store.url}: create it first.")

    def _lost(self, name: str) -> CorruptData:
        return CorruptData(
            f"{self.cell(name).where} is missing although the head names it: restore the object; or, if it is lost, "
            f"drop the slot and create it again at its consumer's position ('strandline slots drop' and 'create')."
        )

    def list(self) -> Sequence[SlotState]:
        """All slots whose cells are written, by name."""
        return self.members(self.read_head()).states

    def floor(self) -> int | None:
        """The lowest position that a valid slot, or one being created or moved, still needs."""
        members = self.members(self.read_head())
        return trimming.floor(members.states, members.pending)

    def flush(self) -> None:
        """Do nothing: positions are written at once."""

    def create(
        self,
        name: str,
        position: int,
        *,
        lifetime: float | None = None,
        retained_from: int | None = None,
        sole: str | None = None,
    ) -> SlotState:
        """Create a slot that pins everything from ``position`` on; for ``lifetime`` seconds, unless it is claimed.

        ``retained_from`` is where the log's cold tier begins, if it has one: a slot may be there, too. ``sole``: a
        prefix; ``AlreadyExists`` if another slot's name has it, decided in one conditional write.
        """
        cell, op = self.cell(name), self.op()
        expires = None if lifetime is None else self._until(lifetime)
        try:
            slots = self.head.update(
                op, lambda head: pin_slot(head, name, position, retained_from, sole), role="consumer"
            ).slots
        except AlreadyExists as error:
            pin, known = self.read_head().slots.get(name), _known(cell)
            if pin is None or (known is not None and known.born >= pin.mark):
                raise
            # It is pinned and has no cell of its own: its creator died between the two. Finish the creation.
            self._first_state(cell, op, name, pin, expires)
            self._settle(name, pin)
            raise AlreadyExists(
                f"There is a slot {name!r} already, at {pin.position}: its creation by another was just finished."
            ) from error
        if name not in slots:
            raise SlotInvalid(f"Slot {name!r} was dropped by another process while it was being created.")
        pin = slots[name]
        if pin is None:
            return cell.read().value  # the answer to the pin was lost, and another process finished the creation
        created = self._first_state(cell, op, name, pin, expires)
        self._settle(name, pin)
        return created

    def _first_state(self, cell: StoreCell[SlotState], op: OpId, name: str, pin: Pin, expires: int | None) -> SlotState:
        now = self.env.clock.now()
        fresh = SlotState(name, pin.position, holder=None, epoch=0, last_seen=now, expires=expires, born=pin.mark)
        with contextlib.suppress(AlreadyExists):
            return cell.create(op, fresh)
        while True:
            found = cell.read().value
            if found.born >= pin.mark:
                # Another process finished this creation, and the slot may have been claimed and moved since: it stays
                # there.
                return found
            # The name was used before. Its epochs continue, so that the old slot's holder stays fenced.
            with contextlib.suppress(Fenced):
                return cell.update(
                    op, partial(_renewed, before=found, position=pin.position, now=now, born=pin.mark, expires=expires)
                )

    def _settle(self, name: str, pin: Pin) -> None:
        self.head.update(self.op(), lambda head: settle_slot(head, name, pin.mark), role="consumer")

    def claim(self, name: str, holder: str, *, hot: bool = False) -> ObjectSlot:
        """Become the slot's holder; a former holder is fenced from now on.

        ``hot`` says that it reads batch objects and nothing else: while it holds the slot, they stay.
        """
        cell = self.cell(name)
        head = self.read_head()
        if name not in head.slots:
            raise self._absent(name)
        before = self._finished(cell, name, head.slots[name])
        state = cell.update(self.op(), lambda slot: rules.claim(slot, holder, self.env.clock.now(), hot=hot))
        if state.holder != holder:
            # The answer was lost, and another holder claimed the slot before it was read again: the epoch is theirs.
            raise Fenced(f"Slot {name!r} was claimed by {state.holder!r} (epoch {state.epoch}) at the same time.")
        pin = head.slots[name]
        if pin is not None and state.epoch > before.epoch:
            # The process that pinned it died, or is fenced by the new epoch: its position will never be written.
            self._settle(name, pin)
        return ObjectSlot(self, cell, name, holder, state.epoch)

    def _finished(self, cell: StoreCell[SlotState], name: str, pin: Pin | None) -> SlotState:
        """The slot; finishes its creation if its creator died before the cell was written.

        Until then there is no cell, or that of a former slot of the same name, which was dropped.
        """
        known = _known(cell)
        if known is not None and not known.dropped:
            return known
        if pin is None and known is None:
            raise self._lost(name)
        if pin is None:
            raise SlotInvalid(f"Slot {name!r} of {self.store.url} was dropped by another process: create it again.")
        return self._first_state(cell, self.op(), name, pin, None)

    def reset(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Move a slot, back or ahead, and make it valid again; its holder is fenced."""
        cell = self.cell(name)
        for _ in range(_RESETS):
            before = self.read(cell, name)
            if before.dropped:
                raise self._absent(name)
            # The pin comes first: from now on no trim goes past the position, and the cell may have it.
            pin = self.head.update(
                self.op(), lambda head: repin_slot(head, name, position, retained_from), role="consumer"
            ).slots.get(name)
            if pin is None:
                continue
            edit = partial(rules.reset, before=before, position=position, now=self.env.clock.now(), born=pin.mark)
            try:
                state = cell.update(self.op(), edit)
            except Fenced:
                continue
            self._settle(name, pin)
            return state
        raise Contended(f"Slot {name!r} of {self.store.url} moved at each of {_RESETS} tries to reset it; try again.")

    def drop(self, name: str) -> None:
        """Remove a slot; records that only it needed may be trimmed from now on."""
        is_listed = name in self.read_head().slots
        cell = self.cell(name)
        state = _known(cell)
        # First the head: the cell of an unlisted name counts for nothing.
        if is_listed:
            self.head.update(self.op(), lambda head: unlist_slot(head, name), role="consumer")
        # Then the cell fences its holder, also one that claimed it meanwhile, but not one of a newly created slot.
        while state is not None and not state.dropped and name not in self.read_head().slots:
            state = cell.update(self.op(), partial(rules.drop, epoch=state.epoch))
        self._forget_hold(name)
        if not is_listed:
            raise NotFound(f"There is no slot {name!r} in {self.store.url}.")

    def hold(self, position: int, seconds: HoldSeconds, *, retained_from: int | None = None) -> Hold:
        """Pin everything from ``position`` on for some time, for a reader that stores nothing."""
        name = f"{HOLDS}{self.env.chance.uuid().hex}"
        self.create(name, position, lifetime=seconds, retained_from=retained_from)
        return Hold(self, name, seconds)

    def renew(self, name: str, position: int, seconds: float) -> None:
        """Extend a hold, from ``position`` on."""
        now, expires = self.env.clock.now(), self._until(seconds)
        self.cell(name).update(self.op(), lambda slot: rules.renew(slot, position=position, expires=expires, now=now))

    def release(self, name: str) -> None:
        """End a hold. Its name is never used again, so that everything of it can be deleted."""
        self._end_hold(name, lambda slot: rules.drop(slot, slot.epoch))

    def expire(self, name: str, now: int) -> bool:
        """End an expired hold; whether it did. A reader that renewed it in the last moment keeps it."""
        return self._end_hold(name, lambda slot: rules.drop(slot, slot.epoch) if rules.has_expired(slot, now) else slot)

    def was_dropped(self, name: str) -> bool:
        """Whether the cell of this name marks its slot as dropped."""
        known = _known(self.cell(name))
        return known is not None and known.dropped

    def _end_hold(self, name: str, end: Callable[[SlotState], SlotState]) -> bool:
        # First the cell: its reader can no longer renew it, and learns that before anything is trimmed.
        with contextlib.suppress(NotFound):
            if not self.cell(name).update(self.op(), end).dropped:
                return False
        self.head.update(self.op(), lambda head: unlist_slot(head, name), role="consumer")
        self._forget_hold(name)
        return True

    def _forget_hold(self, name: str) -> None:
        """Delete the cell of a dropped hold: other names keep theirs, for its epoch."""
        if name.startswith(HOLDS):
            self.store.delete(f"{_FOLDER}{name}.json")

    def _until(self, seconds: float) -> int:
        return self.env.clock.now() + int(seconds * SECOND)

    def advance(self, cell: StoreCell[SlotState], name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Implements a claimed slot's ``advance``; ``Diverged`` if the cursor is of another history of the log."""
        head = self.read_head()
        bounds = bounds_of(head)
        resume.check_cursor(to, Cursor(head.log_id, 0), Bounds(0, bounds.next))
        entries_after(to, bounds.first, lambda offset: entries_from(head, offset, self.chunks))
        now, fingerprint = self.env.clock.now(), to.fingerprint

        def moved(slot: SlotState) -> SlotState:
            return rules.advance(slot, holder=holder, epoch=epoch, to=to.next, now=now, fingerprint=fingerprint)

        self._explained(name, lambda: cell.update(self.op(), moved))

    def touch(self, name: str, epoch: int) -> None:
        """Record that a slot is needed, by its holder or, unclaimed, by its creator."""
        cell, now = self.cell(name), self.env.clock.now()
        self._explained(name, lambda: cell.update(self.op(), lambda slot: rules.seen(slot, epoch=epoch, now=now)))


@checked
@dataclass(frozen=True, slots=True)
class Hold:
    """An expiring slot: records at or above its position are retained for its time, even if its reader dies.

    When :meth:`renew` returns, it is valid; after its time it may be gone.
    """

    keeper: SlotKeeper
    name: str
    seconds: float

    def renew(self, position: int) -> None:
        """Restart its time, and pin only from ``position`` on; ``SlotInvalid`` if it had ended."""
        try:
            self.keeper.renew(self.name, position, self.seconds)
        except NotFound as error:
            raise SlotInvalid(f"The hold {self.name!r} had ended: its records may be deleted. Read again.") from error

    def release(self) -> None:
        """End it now; repeating that is fine."""
        self.keeper.release(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@checked
@dataclass(frozen=True, slots=True)
class ObjectSlot:
    """A claimed slot of an object log; see :class:`~strandline.log.contract.Slot`."""

    keeper: SlotKeeper
    cell: StoreCell[SlotState]
    name: str
    holder: str
    epoch: int

    # Only advancing uses the cell of the claim: other threads read the slot, and touch it, meanwhile.

    def state(self) -> SlotState:
        """The slot's stored state."""
        return self.keeper.read(self.keeper.cell(self.name), self.name)

    def advance(self, to: Cursor) -> None:
        """Durably move the position up."""
        self.keeper.advance(self.cell, self.name, self.holder, self.epoch, to)

    def touch(self) -> None:
        """Heartbeat: durably record that the holder is alive."""
        self.keeper.touch(self.name, self.epoch)


def _renewed(state: SlotState, before: SlotState, position: int, now: int, born: int, expires: int | None) -> SlotState:
    return rules.reset(replace(state, expires=None), before, position, now, born, expires=expires)


def _known(cell: StoreCell[SlotState]) -> SlotState | None:
    try:
        return cell.read().value
    except NotFound:
        return None
