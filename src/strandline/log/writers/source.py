"""Writers of ingested records: their ids and numbers hold the position in the source, so that a target knows it.

The number of an append from a source is the position in the source, and its writer id holds the advance: how many
positions the append covers. The log remembers one number for each source: the position after its last append. So
records and source position are in one append by construction, need no format of their own, and are known even after
the records were trimmed.

Layout of such a UUID (version 8): the mark ``src`` (24 bits), a hash of the source's identity (50 bits), and the
advance (48 bits), which is 0 in the id under which the log remembers the source.

Batches of several processes that are listed together, with one position for all of them, have the mark ``grp`` instead,
the same hash, a hash of the run that has written them (24 bits), and a random number (24 bits) for each process: their
own numbers only tell them apart.

A client that numbers its appends by epochs and sequences of its own (an idempotent producer over HTTP) is such a source
with the mark ``prd``: its position counts its appends, and its proof holds epoch and sequence. Unlike other sources, it
is forgotten when it was silent longest, and an append is a repetition only with the same proof.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput
from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.head import WriterId

_MARK: Final = b"src"
_MEMBER_MARK: Final = b"grp"
_CLIENT_MARK: Final = b"prd"
_MARK_AT: Final = 104
_MARK_NUMBER: Final = int.from_bytes(_MARK, "big")
_MEMBER_NUMBER: Final = int.from_bytes(_MEMBER_MARK, "big")
_CLIENT_NUMBER: Final = int.from_bytes(_CLIENT_MARK, "big")
_ADVANCE: Final = 48
_MOST: Final = (1 << _ADVANCE) - 1
_PROCESS: Final = (1 << 24) - 1
_VERSION: Final = 0x80
_VERSION_AT: Final = 76
_VARIANT: Final = 0x80


def source_writer(identity: str) -> WriterId:
    """The id under which a log remembers the position in a source with this identity.

    >>> writer = source_writer("kafka:cluster/orders/0")
    >>> is_source(writer), is_source(WriterId(UUID(int=7)))
    (True, False)
    >>> source_writer("kafka:cluster/orders/1") == writer
    False
    """
    return _marked(_MARK, identity)


def client_writer(identity: str) -> WriterId:
    """The id under which a log remembers a client that numbers its own appends.

    >>> writer = client_writer("web-1")
    >>> is_client(writer), is_source(writer), is_positioned(writer)
    (True, False, True)
    """
    return _marked(_CLIENT_MARK, identity)


def _marked(mark: bytes, identity: str) -> WriterId:
    data = bytearray(mark + blake2b(identity.encode(), digest_size=7).digest() + bytes(_ADVANCE // 8))
    data[6] = _VERSION | data[6] & 0x0F
    data[8] = _VARIANT | data[8] & 0x3F
    return WriterId(UUID(bytes=bytes(data)))


def is_source(writer: WriterId) -> bool:
    """Whether this is the writer id of an ingested source, which a log never forgets."""
    return _has_mark(writer, _MARK_NUMBER)


def is_client(writer: WriterId) -> bool:
    """Whether this is the writer id of a client that numbers its own appends."""
    return _has_mark(writer, _CLIENT_NUMBER)


def is_positioned(writer: WriterId) -> bool:
    """Whether the numbers of this writer are positions: that of a source, or of a client."""
    return is_source(writer) or is_client(writer)


def _has_mark(writer: WriterId, mark: int) -> bool:
    number = writer.int
    return number >> _MARK_AT == mark and number >> _VERSION_AT & 0x0F == _VERSION >> 4


def member_of(source: WriterId, process: int, run: str = "") -> WriterId:
    """The writer id in batches of one process, which are listed together with those of others, as from ``source``.

    ``run`` identifies the run that repeats the group if it fails, such as a streaming query.

    >>> source = source_writer("orders")
    >>> member = member_of(source, 7, "a query")
    >>> is_member(member), is_source(member), group_of(member) == source
    (True, False, True)
    >>> is_of_run(member, "a query"), is_of_run(member, "another")
    (True, False)
    """
    data = bytearray(_MEMBER_MARK + source.bytes[3:10] + _run_hash(run) + (process & _PROCESS).to_bytes(3, "big"))
    data[6] = _VERSION | data[6] & 0x0F  # the id of a job is of another version
    return WriterId(UUID(bytes=bytes(data)))


def is_of_run(member: WriterId, run: str) -> bool:
    """Whether a run has written the batches of this writer id."""
    return member.bytes[10:13] == _run_hash(run)


def _run_hash(run: str) -> bytes:
    return blake2b(run.encode(), digest_size=3).digest()


def is_member(writer: WriterId) -> bool:
    """Whether this is the writer id of one process's batches in a group."""
    return _has_mark(writer, _MEMBER_NUMBER)


def group_of(member: WriterId) -> WriterId:
    """The id under which a log remembers the position of the group to which a batch belongs."""
    return WriterId(UUID(bytes=_MARK + member.bytes[3:10] + bytes(6)))


def advancing(writer: WriterId, advance: int) -> WriterId:
    """The writer id of an append that advances the position in the source by ``advance``.

    >>> writer = source_writer("orders")
    >>> advance_of(advancing(writer, 1000)), known_as(advancing(writer, 1000)) == writer
    (1000, True)
    """
    if not 0 < advance <= _MOST:
        raise InvalidInput(f"An append advances the position in its source by 1 up to {_MOST:,}, not by {advance:,}.")
    return WriterId(UUID(int=(writer.int >> _ADVANCE << _ADVANCE) | advance))


def advance_of(writer: WriterId) -> int:
    """The number of positions by which an append of this writer advances its source."""
    return writer.int & _MOST


def known_as(writer: WriterId) -> WriterId:
    """The id under which a log remembers a writer: that of the source, whatever the advance."""
    return WriterId(UUID(int=writer.int >> _ADVANCE << _ADVANCE)) if is_positioned(writer) else writer


def remembered(writer: WriterId, number: int) -> tuple[WriterId, int]:
    """The id and number under which a log remembers an append.

    Those of the append, or for an append from a source its id without the advance, and the position after the append.
    """
    if not is_positioned(writer):
        return writer, number
    return known_as(writer), number + advance_of(writer)


def check_source_number(writer: WriterId, number: int) -> None:
    """``InvalidInput`` for an append from a source that advances nothing, or past the largest position."""
    if is_positioned(writer) and (not advance_of(writer) or number + advance_of(writer) > LARGEST_NUMBER):
        raise InvalidInput(
            f"The append from a source at position {number} advances it by {advance_of(writer)}: the id of its writer "
            "holds the advance, at least 1, and positions have 63 bits."
        )
