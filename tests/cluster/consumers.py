"""Consumers of a simulated cluster: named slots on whichever node leads, which they create, claim, move and drop."""

from __future__ import annotations

import random
from dataclasses import dataclass

from strandline.errors import CursorExpired, InvalidInput, NotReady, StrandlineError, TransientStorageError
from strandline.model.retention import SlotState
from strandline.node.node import Node
from tests.cluster.clients import entries
from tests.cluster.history import Broken, Read


@dataclass(slots=True)
class ClientConsumer:
    """One consumer: it confirms what it has read, on whichever node leads."""

    name: str
    confirmed: int = 0
    """The highest position that it ever asked a slot to be at: everything below is confirmed."""
    moves: int = 0
    """How often it created, reset or dropped its slot, or tried to."""
    is_servable: bool = True
    """Whether its slot was created once, at an offset that every node retained, and was only moved up since."""

    def act(self, node: Node, dice: random.Random) -> str:
        """Create the slot, move it up, or drop it; returns what was done, or why that failed."""
        try:
            seen, slots = node.reading(), node.slots
            bounds = seen.bounds()
            state = next((state for state in slots.list() if state.name == self.name), None)
            if state is None or not state.pins:
                at = self._confirm(dice.randint(bounds.first, bounds.next))
                self.moves += 1
                (slots.create if state is None else slots.reset)(self.name, at)
                return f"{self.name} has a slot at {at} on {node.name}"
            if dice.random() < 0.05:
                self.moves += 1
                slots.drop(self.name)
                return f"{self.name} dropped its slot on {node.name}"
            slot = slots.claim(self.name, f"holder-{dice.randrange(3)}")
            at = self._confirm(min(bounds.next, state.position + dice.choice((0, 1, 2, 5, 50))))
            slot.advance(seen.cursor_at(at))
        except (StrandlineError, InvalidInput) as error:
            return f"{self.name} at {node.name}: {type(error).__name__} {error}"
        return f"{self.name} confirmed everything below {at} on {node.name}"

    def start_over(self, node: Node) -> int | None:
        """Put the slot where the log begins, in either tier; returns that offset, or None if that failed."""
        try:
            slots, first = node.slots, node.reading().bounds().first
            is_new = all(state.name != self.name for state in slots.list())
            self.moves += 1
            (slots.create if is_new else slots.reset)(self.name, self._confirm(first))
        except StrandlineError:
            return None
        return first

    def _confirm(self, at: int) -> int:
        self.confirmed = max(self.confirmed, at)  # before the call: its answer may be lost
        return at

    def check(self, node: Node) -> None:
        """Raise :class:`Broken` if the slot on a primary is ahead of what was confirmed, or invalid without a cause."""
        for state in node.primary.slots.list() if node.is_primary and self.is_servable else ():
            if state.name == self.name and state.invalid is not None:
                raise Broken(f"the slot of {self.name} is invalid on {node.name}, and every node could serve it")
        for state in live_slots(node):
            if state.name == self.name and state.position > self.confirmed:
                raise Broken(
                    f"the slot of {self.name} is at {state.position} on {node.name}, and only what is below "
                    f"{self.confirmed} was confirmed"
                )


def live_slots(node: Node) -> list[SlotState]:
    """The valid slots of consumers on a primary; none on a node that does not lead any more."""
    try:
        return [state for state in node.primary.slots.list() if state.pins]
    except NotReady:
        return []


def read_from_slots(name: str, node: Node, least: int = 0) -> Read | None:
    """Read from the lowest live slot at ``least`` or above; :class:`Broken` if retention took what it needs."""
    first = min((state.position for state in live_slots(node) if state.position >= least), default=None)
    if first is None:
        return None
    try:
        seen = node.reading()
        return Read(name, first, entries(seen, first, seen.bounds().next))
    except (NotReady, TransientStorageError):
        return None
    except CursorExpired as error:
        raise Broken(f"a slot on {name} needs offset {first}, which is not retained: {error}") from error
