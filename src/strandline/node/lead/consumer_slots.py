"""Slots of the consumers of a node's log. They are in the same table as those of replicas, under names of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from strandline.errors import AlreadyExists, Fenced, InvalidInput, NotFound, NotReady, SlotInvalid
from strandline.log.slots.rules import check_name
from strandline.log.slots.table import TableSlot, named
from strandline.log.slots.trimming import floor as floor_of
from strandline.log.wal.slots import WalSlots
from strandline.model.addresses import CONSUMER_SUFFIX
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotState
from strandline.node.elect.node_lease import Leadership

MOST_SLOTS: Final = 1000
"""Most slots of consumers: a change of one slot writes all of them again."""

_UNCHANGED: Final = "no slot was changed"


@checked
class ConsumerSlots:
    """The slots of consumers in the table of a primary, while it leads; without those of replicas.

    Satisfies :class:`~strandline.log.contract.Slots`. ``NotReady`` if this node no longer leads: ``Fenced`` tells a
    holder that another one has its slot.
    """

    def __init__(self, table: Callable[[], WalSlots], leadership: Leadership) -> None:
        """``table`` is the primary's as of each call."""
        self.table = table
        self.leadership = leadership

    @contextlib.contextmanager
    def _changing(self) -> Iterator[WalSlots]:
        """The table, for a change of it within the block; raises if this node no longer leads."""
        try:
            self.leadership.check(_UNCHANGED)
        except Fenced as error:
            raise NotReady(str(error)) from error
        try:
            yield self.table()
        except (NotFound, AlreadyExists, Fenced, SlotInvalid) as error:  # with the name that its consumer knows
            raise type(error)(str(error).replace(f"{CONSUMER_SUFFIX}'", "'")) from error

    def _is_shown(self, state: SlotState) -> bool:
        return state.name.endswith(CONSUMER_SUFFIX)

    def _stored(self, name: str) -> str:
        """The name in the table."""
        return check_name(name) + CONSUMER_SUFFIX

    def _shown(self, state: SlotState) -> SlotState:
        """The slot under the name that its holder knows."""
        return replace(state, name=state.name.removesuffix(CONSUMER_SUFFIX))

    def create(
        self, name: str, position: int, *, lifetime: float | None = None, retained_from: int | None = None
    ) -> SlotState:
        """Durably create a slot that pins everything from ``position`` on, in either tier.

        ``retained_from`` is the first offset of the log's cold tier, if it has one: a slot may be there, too.
        ``InvalidInput`` beyond the most that a log has.
        """
        stored = self._stored(name)
        if stored.endswith(CONSUMER_SUFFIX) and len(self.list()) >= MOST_SLOTS:
            raise InvalidInput(f"The log has {MOST_SLOTS:,} slots, which is the most: drop one that nobody needs.")
        with self._changing() as table:
            return self._shown(table.create(stored, position, lifetime=lifetime, retained_from=retained_from))

    def claim(self, name: str, holder: str) -> TableSlot:
        """Durably become the slot's holder; another one is fenced."""
        with self._changing() as table:
            return TableSlot(self, name, holder, table.claim(self._stored(name), holder).epoch)

    def reset(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Durably move a slot and make it valid again; its holder is fenced."""
        with self._changing() as table:
            return self._shown(table.reset(self._stored(name), position, retained_from=retained_from))

    def drop(self, name: str) -> None:
        """Durably remove a slot."""
        with self._changing() as table:
            table.drop(self._stored(name))

    def touch(self, name: str, epoch: int) -> None:
        """Keep a slot alive."""
        with self._changing() as table:
            table.touch(self._stored(name), epoch)

    def advance(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Move a slot up; written before the log trims."""
        with self._changing() as table:
            table.advance(self._stored(name), holder, epoch, to)

    def flush(self) -> None:
        """Write positions that are only in memory so far."""
        with self._changing() as table:
            table.flush()

    def get(self, name: str) -> SlotState:
        """One slot, or ``NotFound``."""
        return named(self.list(), name)

    def list(self) -> Sequence[SlotState]:
        """The slots, by name."""
        return [self._shown(state) for state in self.table().list() if self._is_shown(state)]

    def floor(self) -> int | None:
        """The lowest position that is still needed."""
        return floor_of(self.list())

    def resume(self, name: str, holder: str, former: int) -> TableSlot:
        """Resume as the slot's holder after a failover, by a claim on the former primary, of epoch ``former``.

        ``Fenced`` if it was claimed or reset since, or if a later claim is known.
        """
        with self._changing() as table:
            resumed = table.resume(self._stored(name), holder, former)
        return TableSlot(self, name, holder, resumed.epoch)

    def copies(self) -> tuple[SlotState, ...]:
        """All slots of consumers as they are stored, for replicas to keep."""
        return tuple(self.table().consumers())
