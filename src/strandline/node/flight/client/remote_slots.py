"""The slots of a node's log over Arrow Flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from strandline.errors import Fenced, InvalidInput, NotFound, SlotInvalid
from strandline.formats.json.fields import Fields
from strandline.formats.json.slots import read_slot
from strandline.log.slots.rules import check_name
from strandline.log.slots.table import named
from strandline.log.slots.trimming import floor as floor_of
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotState
from strandline.node.flight.client.node_channels import NodeChannels


@final
@checked
@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """The slots of consumers of a node's log. Satisfies :class:`~strandline.log.contract.Slots`.

    ``NotReady`` from a node that does not lead; with several addresses the one that leads is found. A call without an
    answer is repeated if that is harmless. Creating, resetting and dropping are not: they raise
    ``TransientStorageError``, and may have been executed.
    """

    nodes: NodeChannels

    def create(self, name: str, position: int, *, lifetime: float | None = None) -> SlotState:
        """Durably create a slot that pins everything from ``position`` on."""
        return _state(
            self.nodes.ask_primary("create-slot", name=check_name(name), position=position, lifetime=lifetime)
        )

    def claim(self, name: str, holder: str) -> RemoteSlot:
        """Durably become the slot's holder; another one is fenced."""
        fields = self.nodes.ask_primary("claim-slot", may_repeat=True, name=check_name(name), holder=holder)
        return RemoteSlot(self, name, holder, fields.natural("epoch"))

    def resume(self, name: str, holder: str, former: int) -> int:
        """Resume as the slot's holder after a failover, by a claim of epoch ``former``; returns the new epoch."""
        fields = self.nodes.ask_primary("claim-slot", may_repeat=True, name=name, holder=holder, former=former)
        return fields.natural("epoch")

    def reset(self, name: str, position: int) -> SlotState:
        """Durably move a slot and make it valid again; its holder is fenced."""
        return _state(self.nodes.ask_primary("reset-slot", name=check_name(name), position=position))

    def drop(self, name: str) -> None:
        """Durably remove a slot."""
        self.nodes.ask_primary("drop-slot", name=check_name(name))

    def touch(self, name: str, epoch: int) -> None:
        """Keep a slot alive."""
        self.nodes.ask_primary("touch-slot", may_repeat=True, name=check_name(name), epoch=epoch)

    def advance(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Move a slot up; the node writes it before it trims, and with :meth:`flush`."""
        self.nodes.ask_primary("advance-slot", may_repeat=True, name=name, holder=holder, epoch=epoch, to=to)

    def flush(self) -> None:
        """Let the node write positions that are only in its memory so far."""
        self.nodes.ask_primary("flush-slots", may_repeat=True)

    def get(self, name: str) -> SlotState:
        """One slot, or ``NotFound``."""
        return named(self.list(), check_name(name))

    def list(self) -> Sequence[SlotState]:
        """All slots of consumers, by name."""
        return [_state(fields) for fields in self.nodes.ask_primary("slots", may_repeat=True).objects("slots")]

    def floor(self) -> int | None:
        """The lowest position that a consumer still needs."""
        return floor_of(self.list())


@final
@checked
@dataclass(slots=True, eq=False)
class RemoteSlot:
    """A claimed slot of a node's log. Satisfies :class:`~strandline.log.contract.Slot`.

    A new primary does not know the latest claims of its predecessor. It rejects all of them, and the holder of the last
    one resumes with a new epoch.
    """

    slots: RemoteSlots
    name: str
    holder: str
    epoch: int

    def state(self) -> SlotState:
        """The slot's state on the node."""
        state = self.slots.get(self.name)
        return self.slots.get(self.name) if state.epoch != self.epoch and self._resume() else state

    def advance(self, to: Cursor) -> None:
        """Move the position up."""
        self._as_holder(lambda epoch: self.slots.advance(self.name, self.holder, epoch, to))

    def touch(self) -> None:
        """Renew the slot: its holder is alive."""
        self._as_holder(lambda epoch: self.slots.touch(self.name, epoch))

    def _as_holder(self, call: Callable[[int], None]) -> None:
        try:
            call(self.epoch)
        except Fenced:
            if not self._resume():
                raise
            call(self.epoch)

    def _resume(self) -> bool:
        """Whether this is still the holder, after a failover."""
        try:
            self.epoch = self.slots.resume(self.name, self.holder, self.epoch)
        except (Fenced, InvalidInput, NotFound, SlotInvalid):
            return False
        return True


def _state(fields: Fields) -> SlotState:
    return fields.decoded(read_slot)
