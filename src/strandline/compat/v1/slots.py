"""The one slot of a version 1 queue: its consumer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from strandline.compat.v1 import edits
from strandline.compat.v1.shipper import ManifestCell
from strandline.errors import AlreadyExists, InvalidInput, NotFound
from strandline.log.slots import resume, rules
from strandline.log.slots.table import TableSlot
from strandline.model.arguments import checked
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import QueueManifest
from strandline.model.retention import SlotState
from strandline.storage.fork_check import Origin, bound_to_process

SLOT: Final = "queue"
"""The name of a queue's only slot: its consumer."""


@bound_to_process(close=())
@checked
@dataclass(frozen=True, slots=True)
class QueueSlots:
    """The slots of a queue: one, which is always there. Satisfies :class:`~strandline.log.contract.Slots`."""

    log_id: UUID
    cell: ManifestCell
    _holders: dict[str, int]
    """Epochs by the holders that claimed the queue through this object."""
    _origin: Origin

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
            "into a log with 'strandline upgrade'."
        )

    def claim(self, name: str, holder: str) -> TableSlot:
        """Become the queue's consumer; a former one is fenced from now on.

        The format does not store the holder: only this object recognises a repeated claim of the same holder.
        """
        _check_slot(name)
        if not holder:
            raise InvalidInput("A slot's holder needs a name that is unique to one running consumer.")
        if self._holders.get(holder) != self.cell.read().epoch:
            self._holders[holder] = self.cell.update(edits.claim).epoch
        return TableSlot(self, name, holder, self._holders[holder])

    def reset(self, name: str, position: int) -> SlotState:
        """Move the slot ahead, which acknowledges everything below; its holder is fenced. It cannot move back."""
        _check_slot(name)
        return _state(self.cell.update(lambda manifest: edits.reset(manifest, position)))

    def drop(self, name: str) -> None:
        """Always an error: the slot is the queue itself."""
        _check_slot(name)
        raise InvalidInput(f"The slot {SLOT!r} of a queue of version 1 cannot be dropped: it is the queue itself.")

    def advance(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Durably acknowledge everything below a cursor; ``Fenced`` unless this is the epoch of the last claim."""
        _check_slot(name)
        del holder  # which the format does not store
        resume.check_cursor(to, Cursor(self.log_id, 0), Bounds(0, edits.bounds_of(self.cell.read()).next))
        if to.next:
            self.cell.update(lambda manifest: edits.acknowledge(manifest, epoch=epoch, through=to.next - 1))
        else:
            self.touch(name, epoch)

    def touch(self, name: str, epoch: int) -> None:
        """Check that no other consumer has claimed the queue since."""
        _check_slot(name)
        edits.check_epoch(self.cell.read(), epoch)

    def flush(self) -> None:
        """Do nothing: positions are written at once."""

    def get(self, name: str) -> SlotState:
        """The one slot; its holder and last heartbeat are unknown."""
        _check_slot(name)
        return _state(self.cell.read())

    def list(self) -> Sequence[SlotState]:
        """The one slot."""
        return [self.get(SLOT)]

    def floor(self) -> int | None:
        """The first sequence that is not acknowledged."""
        return edits.first_listed(self.cell.read())


def _check_slot(name: str) -> None:
    if rules.check_name(name) != SLOT:
        raise NotFound(f"A queue of version 1 has one slot, {SLOT!r}, and no {name!r}.")


def _state(manifest: QueueManifest) -> SlotState:
    return SlotState(SLOT, edits.first_listed(manifest), holder=None, epoch=manifest.epoch, last_seen=0)
