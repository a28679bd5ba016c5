"""The identity of a log (``log.json``) and the cell of a slot, both JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec

from strandline.errors import CorruptData
from strandline.formats.json.checked import check_checksum, damage, decode_description, sealed
from strandline.formats.json.slots import read_slot, slot_fields
from strandline.formats.json.value_versions import ValueVersion, read_versions, version_fields
from strandline.model.content_type import check_content_type
from strandline.model.json_values import natural, parse_object, read_record, stamp_fields
from strandline.model.retention import (
    FOREVER,
    NO_LIMITS,
    Retention,
    SlotLimits,
    SlotState,
    parse_retention,
)
from strandline.model.stamp import Stamped

FORMAT_VERSION: Final = 1
CONTENT_TYPE_VERSION: Final = 2
"""Version of the identity of a log with a content type: older programs would drop it from ``log.json``."""
OPEN_WAL: Final = "open it as wal:///path/to/folder"
OPEN_OBJECT_LOG: Final = "open it by its address, such as file:///path/to/folder"
_KIND: Final = "strandline-object-log"
_ADVICE: Final = "Restore the object."


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """A log's identity, retention and value format.

    The identity changes only by an explicit upgrade, retention and value format on request.
    """

    log_id: UUID
    version: int = FORMAT_VERSION
    min_reader: int = FORMAT_VERSION
    value_format: str = "binary"
    retention: Retention = FOREVER
    limits: SlotLimits = NO_LIMITS
    values: tuple[ValueVersion, ...] = ()
    """The versions of the value format; none: values are plain bytes."""
    content_type: str | None = None
    """The media type of the values; None: unspecified."""


def deletion_begun(what: str) -> str:
    """The sentence of whoever opens a log that is being deleted."""
    return f"The deletion of {what} has begun: finish it with 'strandline delete'. Nothing of the log can be used."


def encode_identity(identity: LogIdentity) -> bytes:
    """``log.json``."""
    content = {} if identity.content_type is None else {"content_type": identity.content_type}
    at_least = CONTENT_TYPE_VERSION if content else FORMAT_VERSION
    return sealed(
        {
            "kind": _KIND,
            "log_id": str(identity.log_id),
            "version": max(at_least, identity.version),
            "min_reader": max(at_least, identity.min_reader),
            "value_format": identity.value_format,
            "retention": str(identity.retention),
            "slot_lag_bytes": identity.limits.lag_bytes,
            "slot_idle_seconds": identity.limits.idle_seconds,
            **version_fields(identity.values),
            **content,
        }
    )


def decode_identity(data: bytes | memoryview, where: str) -> LogIdentity:
    """The identity in these bytes, or an error that says what to do."""
    fields = decode_description(
        data,
        where,
        _KIND,
        newest=CONTENT_TYPE_VERSION,
        otherwise="no object log",
        other=("strandline-wal", f"a write-ahead log, and no object log: {OPEN_WAL}"),
        advice=_ADVICE,
    )
    with damage(where, _ADVICE):
        return LogIdentity(
            msgspec.convert(fields["log_id"], UUID),
            natural(fields["version"]),
            natural(fields["min_reader"]),
            msgspec.convert(fields["value_format"], str),
            parse_retention(fields["retention"]),
            SlotLimits(natural(fields.get("slot_lag_bytes", 0)), natural(fields.get("slot_idle_seconds", 0))),
            read_versions(fields),
            read_content_type(fields),
        )


def read_content_type(fields: Mapping[str, Any]) -> str | None:
    """The content type in ``log.json``; ``ValueError`` if it is none."""
    return check_content_type(fields["content_type"]) if "content_type" in fields else None


class IdentityCodec:
    """``log.json`` as a cell's content. It remembers no operations: an edit must change nothing once it is applied."""

    def encode(self, state: Stamped[LogIdentity]) -> bytes:
        """The bytes of an identity."""
        return encode_identity(state.value)

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[LogIdentity]:
        """The identity in these bytes."""
        return Stamped(decode_identity(data, where))


class SlotCodec:
    """A slot as a cell's content; bytes of a slot with another name are damage."""

    def __init__(self, name: str) -> None:
        """The slot called ``name``."""
        self._name = name

    def encode(self, state: Stamped[SlotState]) -> bytes:
        """The bytes of a state."""
        return sealed({**slot_fields(state.value), **stamp_fields(state)})

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[SlotState]:
        """The state in these bytes; damage is an error, never "no slot"."""
        with damage(where, _ADVICE):
            fields = parse_object(data)
            slot = read_slot(fields)
            state = read_record(Stamped, fields, value=slot)
            check_checksum(fields)
        if slot.name != self._name:
            raise CorruptData(f"{where} is damaged: it describes slot {slot.name!r}. {_ADVICE}")
        return state
