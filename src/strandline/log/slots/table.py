"""Slots in one table in memory, and read-only slots."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol
from uuid import UUID

from strandline.errors import AlreadyExists, NotFound, Unsupported
from strandline.log.slots import resume, rules, trimming
from strandline.model.arguments import checked
from strandline.model.cursor import SECOND, Bounds, Cursor
from strandline.model.retention import SlotState
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process


class ClaimedSlots(Protocol):
    """The slots that a claimed slot belongs to."""

    def get(self, name: str) -> SlotState:
        """The state of a slot."""

    def advance(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Move the position up; ``Fenced`` unless this holder has the slot in this epoch."""

    def touch(self, name: str, epoch: int) -> None:
        """Record that the holder is alive."""


@bound_to_process(close=(), keep=("log_id",))
@checked(own=("advance",))
class SlotTable:
    """Slots in memory. Satisfies :class:`~strandline.log.contract.Slots`; safe in threads.

    A subclass makes changes durable before the call returns.
    """

    def __init__(
        self, log_id: UUID, slots: Iterable[SlotState], bounds: Callable[[], Bounds], *, origin: Origin, env: Env
    ) -> None:
        self.log_id = log_id
        self._slots = {state.name: state for state in slots}
        self._bounds = bounds
        self._clock = env.clock
        self._lock = threading.RLock()
        self._origin = origin

    def list(self) -> Sequence[SlotState]:
        """All slots, by name."""
        with self._lock:
            return [state for _, state in sorted(self._slots.items()) if not state.dropped]

    def get(self, name: str) -> SlotState:
        """One slot's state, or ``NotFound``."""
        state = self._slots.get(name)
        if state is None or state.dropped:
            raise NotFound(f"There is no slot {name!r}: create it first.")
        return state

    def floor(self) -> int | None:
        """The lowest position that a valid slot still needs."""
        with self._lock:
            return trimming.floor(self._slots.values())

    def create(
        self,
        name: str,
        position: int,
        *,
        lifetime: float | None = None,
        retained_from: int | None = None,
        hot: bool = False,
    ) -> SlotState:
        """Durably create a slot; with a ``lifetime`` it expires after that time, unless claimed or touched.

        ``retained_from`` is the first offset of the log's cold tier, if it has one: a slot may be there, too. ``hot``:
        its consumer cannot read the cold tier.
        """
        with self._changing():
            former = self._slots.get(rules.check_name(name))
            if former is not None and not former.dropped:
                raise AlreadyExists(f"There is a slot {name!r} already: claim or reset it.")
            rules.check_position(position, self._retained(), retained_from)
            # The former holder of the name stays fenced.
            epoch = self._unused_epoch() if former is None else former.epoch + 1
            self._mark_alive(name)
            now = self._clock.now()
            expires = None if lifetime is None else now + int(lifetime * SECOND)
            born = self._new_mark()
            return self._store(SlotState(name, position, None, epoch, now, expires=expires, born=born, hot=hot))

    def claim(self, name: str, holder: str, *, hot: bool = False) -> TableSlot:
        """Durably become the slot's holder; ``hot`` if that cannot read the cold tier."""
        with self._changing():
            before = self.get(name)
            claimed = rules.claim(before, holder, self._clock.now(), hot=hot)
            self._mark_alive(name)
            if claimed != before:
                self._store(claimed)
            else:
                self._flush()  # the first claim may not be written yet
            return TableSlot(self, name, holder, claimed.epoch)

    def reset(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Durably move a slot and make it valid again."""
        with self._changing():
            before = self.get(name)
            rules.check_position(position, self._retained(), retained_from)
            self._mark_alive(name)
            return self._store(rules.reset(before, before, position, self._clock.now(), self._new_mark()))

    def drop(self, name: str) -> None:
        """Durably remove a slot."""
        with self._changing():
            self._store(rules.drop(self.get(name), self.get(name).epoch))

    def advance(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Move a slot up; written lazily."""
        with self._changing():
            resume.check_cursor(to, Cursor(self.log_id, 0), Bounds(0, self._bounds().next))
            before, now = self.get(name), self._clock.now()
            after = rules.advance(before, holder=holder, epoch=epoch, to=to.next, now=now, fingerprint=to.fingerprint)
            self._note(after)
            self._mark_alive(name)

    def touch(self, name: str, epoch: int) -> None:
        """Record that a slot's holder is alive; written lazily."""
        with self._changing():
            self._note(rules.seen(self.get(name), epoch=epoch, now=self._clock.now()))
            self._mark_alive(name)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield

    def _unused_epoch(self) -> int:
        """An epoch that no holder of an unknown name can have."""
        return 0

    def _new_mark(self) -> int:
        """Identifies a slot from now on until it is created or reset again."""
        return 0

    def _retained(self) -> Bounds:
        """The offsets at which a slot may be."""
        return self._bounds()

    def _mark_alive(self, name: str) -> None:
        """Record that the holder of a slot is alive now."""

    def flush(self) -> None:
        """Write the positions that were only noted."""
        with self._changing():
            self._flush()

    def _flush(self) -> None:
        """Write the noted changes."""

    def _note(self, state: SlotState) -> None:
        self._slots[state.name] = state

    def _store(self, state: SlotState) -> SlotState:
        self._slots[state.name] = state
        return state


@checked
@dataclass(frozen=True, slots=True)
class TableSlot:
    """A claimed slot. Satisfies :class:`~strandline.log.contract.Slot`."""

    slots: ClaimedSlots
    name: str
    holder: str
    epoch: int

    def state(self) -> SlotState:
        """The current state, also if another holder has claimed the slot."""
        return self.slots.get(self.name)

    def advance(self, to: Cursor) -> None:
        """Move the position up. A write-ahead log writes it before it trims."""
        self.slots.advance(self.name, self.holder, self.epoch, to)

    def touch(self) -> None:
        """Record that the holder is alive; written lazily, too."""
        self.slots.touch(self.name, self.epoch)


@checked
@dataclass(frozen=True, slots=True)
class ReadOnlySlots:
    """Slots that can only be read. Every change is ``Unsupported``, with the reason."""

    states: Callable[[], Sequence[SlotState]]
    reason: str

    def create(self, *_: object, **__: object) -> NoReturn:
        """``Unsupported``, as every change."""
        raise Unsupported(self.reason)

    claim = reset = drop = touch = create

    def flush(self) -> None:
        """Do nothing."""

    def get(self, name: str) -> SlotState:
        """One slot, or ``NotFound``."""
        return named(self.list(), name)

    def list(self) -> Sequence[SlotState]:
        """All slots, by name."""
        return sorted((state for state in self.states() if not state.dropped), key=lambda state: state.name)

    def floor(self) -> int | None:
        """The lowest position that a valid slot still needs."""
        return trimming.floor(self.list())


def named(states: Iterable[SlotState], name: str) -> SlotState:
    """The slot of a name among these, or ``NotFound``."""
    for state in states:
        if state.name == name:
            return state
    raise NotFound(f"There is no slot {name!r}: create it first.")
