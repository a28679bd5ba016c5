"""The identity of a log (``log.json``) and the cell of a slot, both JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion, WrongKind
from strandline.formats.json.checked import check_checksum, with_checksum
from strandline.formats.json.slots import read_slot, slot_fields
from strandline.formats.json.value_versions import ValueVersion, read_versions, version_fields
from strandline.model.json_values import (
    natural,
    parse_object,
    read_record,
    stamp_fields,
    text,
)
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
OPEN_WAL: Final = "open it with strandline.open('wal:///path/to/folder')"
OPEN_OBJECT_LOG: Final = "open it with strandline.open"


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


def encode_identity(identity: LogIdentity) -> bytes:
    """``log.json``."""
    return _json(
        {
            "kind": "strandline-object-log",
            "log_id": str(identity.log_id),
            "version": identity.version,
            "min_reader": identity.min_reader,
            "value_format": identity.value_format,
            "retention": str(identity.retention),
            "slot_lag_bytes": identity.limits.lag_bytes,
            "slot_idle_seconds": identity.limits.idle_seconds,
            **version_fields(identity.values),
        }
    )


def decode_identity(data: bytes | memoryview, where: str) -> LogIdentity:
    """The identity in these bytes, or an error that says what to do."""
    fields = _parsed(data, where)
    if fields.get("kind") == "strandline-wal":
        raise WrongKind(f"{where} is of a write-ahead log, and no object log: {OPEN_WAL}.")
    try:
        if fields["kind"] != "strandline-object-log":
            raise CorruptData(f"{where} describes a {str(fields['kind'])[:80]!r}, which is no object log.")
        identity = LogIdentity(
            UUID(fields["log_id"]),
            natural(fields["version"]),
            natural(fields["min_reader"]),
            text(fields["value_format"]),
            parse_retention(fields["retention"]),
            SlotLimits(natural(fields.get("slot_lag_bytes", 0)), natural(fields.get("slot_idle_seconds", 0))),
            read_versions(fields),
        )
    except (KeyError, ValueError, TypeError, AttributeError, InvalidInput) as error:
        raise CorruptData(f"{where} is damaged: {str(error)[:200]!r}. Restore the object.") from error
    if identity.min_reader > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"{where} needs a reader of version {identity.min_reader}, and this program is of version "
            f"{FORMAT_VERSION}: upgrade strandline."
        )
    _check(fields, where)
    return identity


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
        return _json({**slot_fields(state.value), **stamp_fields(state)})

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[SlotState]:
        """The state in these bytes; damage is an error, never "no slot"."""
        fields = _parsed(data, where)
        try:
            slot = read_slot(fields)
            state = read_record(Stamped, fields, value=slot)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CorruptData(f"{where} is damaged: {error!r}. Restore the object.") from error
        _check(fields, where)
        if slot.name != self._name:
            raise CorruptData(f"{where} is damaged: it describes slot {slot.name!r}. Restore the object.")
        return state


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(with_checksum(fields), indent=1, sort_keys=True).encode() + b"\n"


def _parsed(data: bytes | memoryview, where: str) -> dict[str, Any]:
    try:
        return parse_object(data)
    except ValueError as error:
        raise CorruptData(f"{where} is damaged: it is not JSON ({str(error)[:80]}). Restore the object.") from error


def _check(fields: dict[str, Any], where: str) -> None:
    try:
        check_checksum(fields)
    except ValueError as error:
        raise CorruptData(f"{where} is damaged: {error}. Restore the object.") from error
