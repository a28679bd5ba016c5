"""Slots of a write-ahead log as JSON, in this and in older versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from strandline.model.json_values import fingerprint_of, fingerprint_text
from strandline.model.retention import Invalidation, InvalidReason, SlotState

T = TypeVar("T")

_LARGEST: Final = (1 << 64) - 1
_MICROSECONDS: Final = 1000


def slots_of(fields: dict[str, Any], now: int) -> list[SlotState]:
    """The slots that a decoded object lists; ``ValueError`` and the like if it does not."""
    slots = [slot_of(slot, now) for slot in _of_type(list, fields["slots"])]
    if len({slot.name for slot in slots}) < len(slots):
        raise ValueError("two slots have the same id")
    return slots


def slot_fields(slot: SlotState) -> dict[str, Any]:
    """A slot as JSON: in the slots file of a write-ahead log, and in a cell."""
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


def slot_of(fields: Mapping[str, Any], now: int) -> SlotState:
    """One slot; ``ValueError``, ``KeyError`` or ``TypeError`` for anything else."""
    holder, expires, suspected = fields.get("holder"), fields.get("expires"), fields.get("suspected")
    return SlotState(
        name=_of_type(str, fields["id"]),
        # An lsn is an offset plus one: the last lsn that a consumer has is the next offset that it needs.
        position=natural_of(fields["position"] if "position" in fields else fields["restart_lsn"]),
        holder=None if holder is None else _of_type(str, holder),
        epoch=natural_of(fields.get("epoch", 0)),
        last_seen=_time(fields, "last_seen", "last_seen_at_unix_ms", now),
        invalid=_invalid(fields, now),
        expires=None if expires is None else natural_of(expires),
        dropped=_of_type(bool, fields.get("dropped", False)),
        born=natural_of(fields.get("born", 0)),
        hot=_of_type(bool, fields.get("hot", False)),
        suspected=None if suspected is None else natural_of(suspected),
        fingerprint=fingerprint_of(fields.get("fingerprint")),
    )


def _invalid(fields: Mapping[str, Any], now: int) -> Invalidation | None:
    invalid, reason = fields.get("invalid"), fields.get("invalidation_reason")
    if invalid is not None:
        return Invalidation(InvalidReason(invalid["reason"]), natural_of(invalid["at"]))
    if reason is not None:
        return Invalidation(InvalidReason(reason), _time(fields, "invalidated_at", "invalidated_at_unix_ms", now))
    return None


def _time(fields: Mapping[str, Any], name: str, older: str, now: int) -> int:
    if fields.get(name) is not None:
        return natural_of(fields[name])
    milliseconds = fields.get(older)
    return now if milliseconds is None else natural_of(milliseconds) * _MICROSECONDS


def _of_type(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} belongs")  # noqa: TRY004 - the bytes are wrong
    return value


def natural_of(value: object) -> int:
    """A number of 64 bits. Older writers stored all numbers as floats, so that 7.0 is 7."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        # The value itself is not shown: it may be as large as the whole payload.
        raise ValueError(f"a {type(value).__name__} is where a number of 64 bits belongs")
    return value
