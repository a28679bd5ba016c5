"""Slots of a migrated spool: which stay valid in the log, and which refuse the migration."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from strandline.compat.spool.format import decode_slots
from strandline.errors import CorruptData, InvalidInput
from strandline.log.slots.rules import check_name, invalidate
from strandline.model.cursor import Bounds
from strandline.model.retention import InvalidReason, SlotState

_LOGGER: Final = logging.getLogger(__name__)


def spool_slots(data: bytes | None, path: str, *, now: int) -> list[SlotState]:
    """The slots of a spool; none without a file. ``InvalidInput`` for a name that no slot of a log may have."""
    slots = [] if data is None else decode_slots(data, path, now=now)
    for slot in slots:
        try:
            check_name(slot.name)
        except InvalidInput as error:
            raise InvalidInput(f"{path} has a slot that no log may have: {error}") from error
    return slots


def settle_slots(slots: Iterable[SlotState], bounds: Bounds, *, now: int, where: str) -> list[SlotState]:
    """The slots of the log: those that need records which it no longer retains are invalid from now on.

    ``CorruptData`` for a valid slot past the end: its consumer got records that are missing here, and would
    skip the next ones with their numbers.
    """
    settled = []
    for slot in slots:
        if slot.pins and slot.position > bounds.next:
            raise CorruptData(
                f"{where} has slot {slot.name!r} at {slot.position}, but the spool ends at {bounds.next}: records are "
                "lost that its consumer has; nothing was changed. Restore the spool, or remove the slot from "
                "the file and bootstrap its consumer again."
            )
        if slot.pins and slot.position < bounds.first:
            _LOGGER.warning(
                "Slot %r of %s needs records from offset %d on, but the spool begins at %d: it is invalid, and its "
                "consumer has to bootstrap again.", slot.name, where, slot.position, bounds.first,
            )  # fmt: skip
            settled.append(invalidate(slot, slot, InvalidReason.WAL_REMOVED, now))
        else:
            settled.append(slot)
    return settled
