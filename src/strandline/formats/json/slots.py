"""A slot as JSON: in its cell, in the slots file of a write-ahead log, and in the messages of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strandline.model.json_values import fingerprint_of, fingerprint_text, items, read_record, text, whole
from strandline.model.retention import Invalidation, InvalidReason, SlotState


def slot_fields(slot: SlotState) -> dict[str, Any]:
    """The fields of a slot."""
    fields: dict[str, Any] = {
        "id": slot.name,
        "position": slot.position,
        "holder": slot.holder,
        "epoch": slot.epoch,
        "last_seen": slot.last_seen,
        "born": slot.born,
    }
    if slot.invalid is not None:
        fields["invalid"] = {"reason": str(slot.invalid.reason), "at": slot.invalid.at}
    if slot.expires is not None:
        fields["expires"] = slot.expires
    if slot.dropped:
        fields["dropped"] = True
    if slot.hot:
        fields["hot"] = True
    if slot.suspected is not None:
        fields["suspected"] = slot.suspected
    if slot.fingerprint is not None:
        fields["fingerprint"] = fingerprint_text(slot.fingerprint)
    return fields


def read_slot(fields: Mapping[str, Any]) -> SlotState:
    """The slot in these fields; ``ValueError``, ``KeyError`` or ``TypeError`` for anything else.

    >>> read_slot(slot_fields(SlotState("search", 7, None, 0, -1))).position
    7
    """
    gone = fields.get("invalid")
    return read_record(
        SlotState,
        fields,
        optional=("dropped", "born", "hot"),
        name=text(fields["id"]),
        last_seen=whole(fields["last_seen"]),
        invalid=None if gone is None else Invalidation(InvalidReason(gone["reason"]), whole(gone["at"])),
        expires=_maybe_whole(fields.get("expires")),
        suspected=_maybe_whole(fields.get("suspected")),
        fingerprint=fingerprint_of(fields.get("fingerprint")),
    )


def read_slots(found: object) -> tuple[SlotState, ...]:
    """The slots in a list; ``ValueError`` also if two of them have the same name."""
    slots = tuple(map(read_slot, items(found)))
    if len({slot.name for slot in slots}) < len(slots):
        raise ValueError("two slots have the same id")
    return slots


def _maybe_whole(value: object) -> int | None:
    return None if value is None else whole(value)
