"""Proofs of ingested sources in tables of writers: each is a row of its own, which older versions take for a writer.

The id of such a row is a UUID of version 8: the bytes ``srp`` (``prp`` for a client that numbers its appends), the same
hash as in the writer id, and the term (48 bits). The row has as its number the lower 63 bits of the fingerprint, as its
first offset the position, as its count the highest bit of the fingerprint, and the sequence and time of the source's
own row. A row whose sequence is another one is of an earlier append, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Final
from uuid import UUID

from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.head import SourceProof, WriterId, WriterState

_PROOFS: Final = {b"src": b"srp", b"prd": b"prp"}
"""The first bytes of a proof's row, by those of the writer that it is of: a source, or a client."""
_OF: Final = {proof: writer for writer, proof in _PROOFS.items()}
_TERM_BYTES: Final = 6
_VERSION: Final = 8
_HIGHEST: Final = 63


WriterRow = tuple[bytes, int, int, int, int, int]
"""A writer id, and the numbers of its last append, in the order of :class:`~strandline.model.head.WriterState`."""
_numbers_of: Final = attrgetter("number", "sequence", "first", "count", "listed")


def rows_with_proofs(writers: Iterable[tuple[WriterId, WriterState]]) -> Iterator[WriterRow]:
    """The rows of a table of writers as they are stored: a proof follows the row of its source."""
    for writer, state in writers:
        yield (writer.bytes, *_numbers_of(state))
        proof = state.proof
        mark = _PROOFS.get(writer.bytes[:3])
        if proof is not None and mark is not None and proof.term >> 8 * _TERM_BYTES == 0:
            row = mark + writer.bytes[3:10] + proof.term.to_bytes(_TERM_BYTES, "big")
            low, high = proof.fingerprint & LARGEST_NUMBER, proof.fingerprint >> _HIGHEST
            yield row, low, state.sequence, proof.next, high, state.listed


def without_proof_rows(rows: Iterable[WriterRow]) -> dict[WriterId, WriterState]:
    """The writers in stored rows; the state of a source has its proof.

    >>> source = WriterId(UUID(bytes=b"src000" + bytes([128] * 4) + bytes(6)))
    >>> known = {source: WriterState(9, 3, 5, 2, 0, SourceProof(12, 4, 1 << 63 | 5))}
    >>> without_proof_rows(rows_with_proofs(known.items()))[source].proof
    SourceProof(next=12, term=4, fingerprint=9223372036854775813)
    """
    writers: dict[WriterId, WriterState] = {}
    proofs: list[tuple[bytes, WriterState]] = []
    for row, number, sequence, first, count, listed in rows:
        state = WriterState(number, sequence, first, count, listed)
        if row[:3] in _OF and row[6] >> 4 == _VERSION:
            proofs.append((row, state))
        else:
            writers[writer_id(row)] = state
    for row, held in proofs:
        source = WriterId(UUID(bytes=_OF[row[:3]] + row[3:10] + bytes(_TERM_BYTES)))
        last = writers.get(source)
        if last is not None and last.sequence == held.sequence and held.count <= 1:
            term = int.from_bytes(row[10:], "big")
            proof = SourceProof(held.first, term, held.count << _HIGHEST | held.number)
            writers[source] = replace(last, proof=proof)
    return writers


@lru_cache(1024)
def writer_id(data: bytes) -> WriterId:
    """The writer id in these bytes; most are read many times."""
    return WriterId(UUID(bytes=data))
