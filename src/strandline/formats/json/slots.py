"""A slot as JSON: in its cell, in the slots file of a write-ahead log, and in the messages of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from strandline.model.json_values import fingerprint_of, fingerprint_text
from strandline.model.retention import SlotState


def slot_fields(slot: SlotState) -> dict[str, Any]:
    """The fields of a slot; those that are null or false are left out."""
    found = msgspec.to_builtins(slot)
    if slot.fingerprint is not None:
        found["fingerprint"] = fingerprint_text(slot.fingerprint)
    fields = {"id": found.pop("name"), **found}
    return {name: value for name, value in fields.items() if name == "holder" or not (value is None or value is False)}


def read_slot(fields: Mapping[str, Any]) -> SlotState:
    """The slot in these fields; ``ValueError``, ``KeyError`` or ``TypeError`` for anything else.

    >>> read_slot(slot_fields(SlotState("search", 7, None, 0, -1))).position
    7
    """
    found = {**fields, "name": fields["id"], "fingerprint": fingerprint_of(fields.get("fingerprint"))}
    return msgspec.convert(found, SlotState)


def read_slots(found: object) -> tuple[SlotState, ...]:
    """The slots in a list; ``ValueError`` also if two of them have the same name."""
    slots = tuple(map(read_slot, msgspec.convert(found, list[dict[str, Any]])))
    if len({slot.name for slot in slots}) < len(slots):
        raise ValueError("two slots have the same id")
    return slots
