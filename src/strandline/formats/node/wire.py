"""Messages that accompany Arrow batches: batch metadata, acknowledgements and their answers, errors.

All numbers are little-endian and fit 63 bits. Every fixed part ends with its CRC32C.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from uuid import UUID

import pyarrow as pa

from strandline import errors
from strandline.errors import CorruptData, ExpectationFailed, Sealed, StrandlineError
from strandline.formats.arrow.block import page_checksum
from strandline.formats.checksum import crc32c
from strandline.formats.json.fields import Fields, write_fields
from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.head import SourceProof, WriterId, proof_of, proven
from strandline.model.node import Heartbeat

_VERSION: Final = 1
_NOTE = struct.Struct("<BB2xQQQQ16sQQQQQQI")
_PROOF = struct.Struct("<QQQ")
_ADVANCE = struct.Struct("<BB2xQQQQQ")
_ANSWER = struct.Struct("<BB2xQQQQQ")
_CHECKSUM = struct.Struct("<I")
NOTE_SIZE: Final = _NOTE.size + _CHECKSUM.size
_LONGEST_REASON: Final = 4096
_LONGEST_SENTENCE: Final = 1000
"""In bytes: errors are sent twice in the headers of an answer, which may hold 8 KiB."""


class Flag:
    """Flags of a note about its Arrow batch. Plain numbers: an enumeration costs more than the rest of a note."""

    LAST: Final = 1
    """It is the last part of its log batch."""
    NUMBERED: Final = 2
    """The log batch was appended with a writer and a number."""
    HEARTBEAT: Final = 4
    """It holds no records: only the primary's heartbeat."""
    READ: Final = 8
    """It is for a reader: with an ``offset`` column, and perhaps only a part of a log batch."""

    PROVEN: Final = 16
    """The log batch holds records of an ingested source: position, term and fingerprint of the source follow."""

    SEALED: Final = 32
    """The last that is durable on the primary is a seal. Nodes of earlier versions refuse such a heartbeat."""

    ALL: Final = LAST | NUMBERED | HEARTBEAT | READ | PROVEN | SEALED


class Note(NamedTuple):
    """The note of an Arrow batch. A log batch is sent as one or more of them, whose notes differ only in ``LAST``."""

    flags: int
    first: int
    """The offset of the first record of the *log* batch."""
    records: int
    """Number of records in all parts of the log batch."""
    term: int
    timestamp: int
    """When it was written, in milliseconds."""
    append: tuple[WriterId, int] | None
    heartbeat: Heartbeat
    content: int = 0
    """Checksum of its Arrow batch: :func:`content_checksum`; 0 without records."""


def content_checksum(batch: pa.RecordBatch) -> int:
    """The CRC32C of a batch's bytes as Arrow sends them: the body of its message, which does not depend on the encoder.

    The message's header is excluded: it may differ between versions of Arrow.
    """
    return page_checksum([memoryview(batch.serialize()).cast("B")])


def encode_note(note: Note) -> bytes:
    """The bytes of a note: of constant size, with the proof of an ingested source behind it, if it has one."""
    writer, number = (note.append[0].bytes, note.append[1]) if note.append else (bytes(16), 0)
    proof = proof_of(note.append[0]) if note.append else None
    *numbers, sealed = note.heartbeat
    flags = note.flags | (Flag.NUMBERED if note.append else 0) | (0 if proof is None else Flag.PROVEN)
    flags |= Flag.SEALED if sealed else 0
    what = (note.first, note.records, note.term, note.timestamp, writer, number)
    behind = b"" if proof is None else _PROOF.pack(*proof)
    return _sealed(_NOTE.pack(_VERSION, flags, *what, *numbers, note.content) + behind)


def decode_note(data: bytes | memoryview | None, where: str) -> Note:
    """Decode a note; ``CorruptData`` for any other bytes."""
    body = _unsealed(data, "A note", where, _NOTE.size, _NOTE.size + _PROOF.size)
    found = _NOTE.unpack_from(body)
    version, flags, first, count, term, timestamp, writer, number, *heartbeat, content = found
    _check(where, version, first + count, term, timestamp, number, *heartbeat)
    if flags & ~Flag.ALL:
        raise CorruptData(f"A note of {where} has unknown flags ({flags}): both ends need the same version.")
    if len(body) != _NOTE.size + (_PROOF.size if flags & Flag.PROVEN else 0):
        raise CorruptData(f"A note of {where} has {len(body)} bytes, which is not its size: ask again.")
    append = (WriterId(UUID(bytes=writer)), number) if flags & Flag.NUMBERED else None
    if append is not None and flags & Flag.PROVEN:
        proof = SourceProof(*_PROOF.unpack_from(body, _NOTE.size))
        _check(where, version, proof.next, proof.term)
        append = (proven(append[0], proof), number)
    word = Heartbeat(*heartbeat)
    if flags & Flag.SEALED:
        word = word._replace(sealed=True)
    return Note(flags & ~(Flag.PROVEN | Flag.SEALED), first, count, term, timestamp, append, word, content)


class Advance(NamedTuple):
    """A replica's acknowledgement on the wire."""

    term: int
    """The highest term that it has seen."""
    applied: int
    durable: int
    apply_errors: int
    divergences: int
    is_answered: bool = True
    """Whether an answer is requested; otherwise only a rejection is answered."""


def encode_advance(advance: Advance) -> bytes:
    """The bytes of an acknowledgement."""
    *numbers, is_answered = advance
    return _sealed(_ADVANCE.pack(_VERSION, not is_answered, *numbers))


def decode_advance(data: bytes | memoryview | None, where: str) -> Advance:
    """Decode an acknowledgement; ``CorruptData`` for any other bytes."""
    body = _unsealed(data, "An acknowledgement", where, _ADVANCE.size, _ADVANCE.size)
    version, quiet, *numbers = _ADVANCE.unpack(body)
    _check(where, version, *numbers)
    if quiet > 1:
        raise CorruptData(f"An acknowledgement of {where} has unknown flags ({quiet}): run the same version on both.")
    term, applied, durable, apply_errors, divergences = numbers
    return Advance(term, applied, durable, apply_errors, divergences, not quiet)


def encode_answer(heartbeat: Heartbeat, refused: str | None) -> bytes:
    """The bytes of the answer to an acknowledgement: a fixed part, and the reason of a rejection."""
    reason = b"" if refused is None else refused.encode()[:_LONGEST_REASON]
    *numbers, _ = heartbeat  # the feed tells of a seal
    return _sealed(_ANSWER.pack(_VERSION, refused is not None, *numbers) + reason)


def decode_answer(data: bytes | memoryview | None, where: str) -> tuple[Heartbeat, str | None]:
    """Decode an answer; ``CorruptData`` for any other bytes."""
    body = _unsealed(data, "An answer", where, _ANSWER.size, _ANSWER.size + _LONGEST_REASON)
    version, refused, *heartbeat = _ANSWER.unpack_from(body)
    _check(where, version, *heartbeat)
    reason = bytes(body[_ANSWER.size :]).decode(errors="replace")
    return Heartbeat(*heartbeat), reason if refused else None


def _sealed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(crc32c(body))


def _unsealed(data: bytes | memoryview | None, what: str, where: str, smallest: int, largest: int) -> bytes:
    if data is None or not smallest <= len(data) - _CHECKSUM.size <= largest:
        size = 0 if data is None else len(data)
        raise CorruptData(f"{what} of {where} has {size} bytes, which is not its size: ask again.")
    body = bytes(data[: -_CHECKSUM.size])
    if crc32c(body) != _CHECKSUM.unpack_from(data, len(body))[0]:
        raise CorruptData(f"{what} of {where} is damaged: its checksum is wrong. Ask again.")
    return body


def _check(where: str, version: int, *numbers: int) -> None:
    if version != _VERSION:
        raise CorruptData(
            f"{where} uses version {version} of the protocol, and this program version {_VERSION}: run the same "
            "version of strandline on both."
        )
    if max(numbers) > LARGEST_NUMBER:
        raise CorruptData(f"A message of {where} is damaged: it has numbers out of range.")


# --- errors ----------------------------------------------------------------------------------------------------

_KNOWN: Final[dict[str, type[StrandlineError]]] = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, StrandlineError)
}
"""The errors by name: received names can create no other class."""


def encode_error(error: StrandlineError) -> bytes:
    """An error as its class's name and its sentence; for a class outside the tree, the nearest base class."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _KNOWN.get(kind.__name__) is kind)
    fields: dict[str, object] = {"error": name, "message": cut(str(error))}
    if isinstance(error, ExpectationFailed | Sealed) and error.end is not None:
        fields["end"] = error.end
    return write_fields(fields)


def cut(sentence: str) -> str:
    """A sentence that is short enough for a header."""
    data = sentence.encode(errors="replace")
    if len(data) <= _LONGEST_SENTENCE:
        return data.decode()
    return data[: _LONGEST_SENTENCE - 3].decode(errors="ignore") + "..."


def decode_error(data: bytes | memoryview | None) -> StrandlineError | None:
    """Decode an error, as its original class; None if there is none."""
    if not data:
        return None
    try:
        fields = Fields.parse(data, "an error", wrong=CorruptData)
        kind = _KNOWN.get(fields.text("error"))
        sentence, end = fields.text("message"), fields.maybe_natural("end")
    except CorruptData:
        return None
    if kind is None:
        return None
    error = kind(sentence)
    if isinstance(error, ExpectationFailed | Sealed):
        error.end = end
    return error
