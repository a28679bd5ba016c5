"""Identity, start and slots of a write-ahead log, as JSON files beside its frames.

Also the metadata of its frames: the writer of a frame, and the first frame of each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec

from strandline.errors import CorruptData
from strandline.formats.json.checked import damage, decode_checked, decode_description, encode_checked, with_checksum
from strandline.formats.json.slots import read_slots, slot_fields
from strandline.formats.json.value_versions import ValueVersion, read_versions, version_fields
from strandline.formats.object.identity import OPEN_OBJECT_LOG, read_content_type
from strandline.formats.source_proofs import rows_with_proofs, without_proof_rows
from strandline.model.arguments import Natural, Signed
from strandline.model.head import SourceProof, WriterId, WriterState, proof_of, proven
from strandline.model.json_values import natural, parse_json, read_record
from strandline.model.retention import SlotState

KIND: Final = "strandline-wal"
FORMAT_VERSION: Final = 1
SEALED_VERSION: Final = 2
"""Version of the identity of a sealed log, or of one with a content type: older programs refuse to open it."""
SLOTS_KIND: Final = "strandline-wal-slots"
_REWIND_KIND: Final = "strandline-wal-rewind"
_LOG: Final = "log"
_WRITERS: Final = "writers"
_WRITER: Final = "writer"
_NUMBER: Final = "number"
_PROOF: Final = "proof"
_WriterRow = tuple[WriterId, Signed, Signed, Signed, Signed, Signed]


# --- identity --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WalIdentity:
    """The content of ``log.json``."""

    log_id: UUID
    values: tuple[ValueVersion, ...] = ()
    """The versions of the value format; none: values are plain bytes."""
    sealed: int | None = None
    """The offset at which the log is sealed as soon as it ends there. Written before the last batch, so that both are
    one step: a log that ends below it after a crash was not sealed."""
    content_type: str | None = None
    """The media type of the values; None: unspecified."""
    deleting: bool = False
    """Whether its deletion has begun: then the log is not opened any more."""


def encode_wal_identity(identity: WalIdentity) -> bytes:
    """``log.json``."""
    later = {"sealed": identity.sealed, "content_type": identity.content_type, "deleting": identity.deleting or None}
    added = {name: value for name, value in later.items() if value is not None}
    version = SEALED_VERSION if added else FORMAT_VERSION
    fields = {"kind": KIND, "log_id": str(identity.log_id), "version": version, "min_reader": version}
    return json.dumps(with_checksum({**fields, **version_fields(identity.values), **added}), indent=1).encode() + b"\n"


def decode_wal_identity(data: bytes, where: str) -> WalIdentity:
    """The content of ``log.json``, or an error that says what to do."""
    fields = decode_description(
        data,
        where,
        KIND,
        newest=SEALED_VERSION,
        otherwise="no write-ahead log",
        other=("strandline-object-log", f"an object log, and no write-ahead log: {OPEN_OBJECT_LOG}"),
        advice="Restore the file.",
    )
    with damage(where, "Restore the file."):
        sealed = natural(fields["sealed"]) if "sealed" in fields else None
        return WalIdentity(
            msgspec.convert(fields["log_id"], UUID),
            read_versions(fields),
            sealed,
            read_content_type(fields),
            fields.get("deleting") is True,
        )


# --- start and slots -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotsFile:
    """The content of ``slots.json``: the start of the log, and its slots."""

    log_id: UUID
    start: int
    slots: tuple[SlotState, ...] = ()


def encode_slots_file(kept: SlotsFile) -> bytes:
    """``slots.json``."""
    fields = {"log_id": str(kept.log_id), "start": kept.start, "slots": list(map(slot_fields, kept.slots))}
    return encode_checked(SLOTS_KIND, FORMAT_VERSION, fields)


def decode_slots_file(data: bytes, where: str) -> SlotsFile:
    """The start and the slots in these bytes; damage is ``CorruptData``, never "no slots"."""
    with damage(
        where,
        "It holds the start of the log and its slots, so nothing is served or trimmed without it: restore the file "
        "from a backup, or let 'strandline wal repair --forget-slots' make one without slots, and create them again.",
    ):
        fields = decode_checked(data, SLOTS_KIND, FORMAT_VERSION)
        return SlotsFile(msgspec.convert(fields["log_id"], UUID), natural(fields["start"]), read_slots(fields["slots"]))


# --- rewind in progress -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rewinding:
    """The plan of a rewind, written before anything is truncated, so that the next opening can finish it."""

    log_id: UUID
    to: Natural
    """The log's end afterwards."""
    end: Natural
    """The log's end before."""
    term: Natural
    """Term of the last remaining record."""
    file: Natural
    """First offset of the file that is truncated."""
    size: Natural
    """Bytes of it that stay."""
    index_size: Natural
    """0, since its index is rebuilt. Earlier versions kept these bytes of it."""
    begins: Natural
    """First offset of the file that replaces the truncated frame."""
    quarantine: str
    """The folder with everything from ``to`` on."""


def encode_rewinding(value: Rewinding) -> bytes:
    """``rewind.json``."""
    return encode_checked(_REWIND_KIND, FORMAT_VERSION, msgspec.to_builtins(value))


def decode_rewinding(data: bytes, where: str) -> Rewinding:
    """Decode a rewind, or ``CorruptData``."""
    with damage(
        where,
        "It holds the plan of a rewind, and nothing is done without it: restore the file, or the log from a backup.",
    ):
        return read_record(Rewinding, decode_checked(data, _REWIND_KIND, FORMAT_VERSION))


# --- metadata of frames ----------------------------------------------------------------------------------------


def batch_metadata(writer: WriterId, number: int) -> dict[str, str]:
    """Metadata with the writer and number of a frame, and the proof of an ingested source."""
    fields = {_WRITER: writer.hex, _NUMBER: str(number)}
    proof = proof_of(writer)
    return fields if proof is None else {**fields, _PROOF: str(proof)}


def append_of(metadata: Mapping[bytes, bytes], where: str) -> tuple[WriterId, int] | None:
    """Writer and number of a frame's append; None for unnumbered records."""
    found = metadata.get(_WRITER.encode())
    if found is None:
        return None
    try:
        writer, proof = WriterId(UUID(hex=found.decode())), metadata.get(_PROOF.encode())
        held = proven(writer, None if proof is None else SourceProof.parse(proof.decode()))
        return held, natural(int(metadata[_NUMBER.encode()]))
    except (KeyError, ValueError) as error:
        raise CorruptData(f"{where} is damaged: its writer cannot be read ({error!r}).") from error


def lead_metadata(log_id: UUID, writers: Iterable[tuple[WriterId, WriterState]]) -> dict[str, str]:
    """Metadata of a file's first frame: the log's identity, and the last append of each writer before it."""
    rows = [[writer.hex(), *numbers] for writer, *numbers in rows_with_proofs(writers)]
    return {_LOG: str(log_id), _WRITERS: json.dumps(rows, separators=(",", ":"))}


def lead_of(metadata: Mapping[bytes, bytes], where: str) -> tuple[UUID, dict[WriterId, WriterState]]:
    """The log that a file belongs to, and the last append of each writer before it."""
    try:
        rows = msgspec.convert(parse_json(metadata[_WRITERS.encode()]), list[_WriterRow])
        found = without_proof_rows((row[0].bytes, *row[1:]) for row in rows)
        return UUID(metadata[_LOG.encode()].decode()), found
    except (KeyError, ValueError) as error:
        raise CorruptData(f"{where} is damaged: its beginning cannot be read ({error!r}).") from error
