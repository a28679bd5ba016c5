"""Flight tickets: the stream that a client requests, as a small JSON object, and signed tickets for spans."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

import msgspec

from strandline.errors import InvalidInput
from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.formats.json.fields import Fields, write_record
from strandline.model.arguments import Natural
from strandline.model.cursor import Cursor
from strandline.model.json_values import PlainName


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """Records with their offsets, up to the commit watermark.

    >>> encode_ticket(ReadTicket(follow=True))
    b'{"since":null,"upto":null,"follow":true,"columns":null}'
    >>> decode_ticket(b'{"columns": ["offset", "value"]}').columns
    ('offset', 'value')
    """

    since: Cursor | None = None
    """None for everything that is retained."""
    upto: Natural | None = None
    """None for the current end; with ``follow``, for no end."""
    follow: bool = False
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class FeedTicket:
    """Log batches for a replica, up to the durable end, without an end."""

    replica: PlainName
    term: Natural
    since: Cursor


@dataclass(frozen=True, slots=True)
class ReportTicket:
    """A replica's acknowledgements."""

    replica: PlainName


@dataclass(frozen=True, slots=True)
class FileTicket:
    """A piece of a snapshot's file: from a byte on, about ``limit`` bytes."""

    replica: PlainName
    term: Natural
    snapshot: PlainName
    path: str
    offset: Natural
    limit: Natural


Ticket: TypeAlias = ReadTicket | FeedTicket | ReportTicket | FileTicket


def encode_ticket(ticket: Ticket) -> bytes:
    """The bytes of a ticket."""
    return write_record(ticket)


def decode_ticket(data: bytes | memoryview) -> Ticket:
    """Decode a ticket; ``InvalidInput`` if it cannot be read. An empty ticket requests the whole log."""
    fields = Fields.parse(data or b"{}", "The ticket")
    if "snapshot" in fields:
        fields.only("replica", "term", "snapshot", "path", "offset", "limit")
        return fields.record(FileTicket)
    if "replica" in fields:
        fields.only("replica", "term", "since")
        if "term" not in fields and "since" not in fields:
            return fields.record(ReportTicket)
        return fields.record(FeedTicket, since=fields.cursor("since"))
    fields.only("since", "upto", "follow", "columns")
    return fields.record(ReadTicket, follow=fields.flag("follow"), since=fields.maybe_cursor("since"))


# --- signed tickets --------------------------------------------------------------------------------------------

_PURPOSE: Final = b"strandline span ticket 1\n"
"""Signed with every ticket: a signature by the same key for anything else is no ticket."""

_LONGEST: Final = 4096
_KEY_BYTES: Final = 32
_KEYS_KIND: Final = "strandline-ticket-keys"
_KEYS_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SpanTicket:
    """The right to read offsets ``first`` up to ``next`` of a log until a time, and nothing else."""

    log_id: UUID
    first: Natural
    next: Natural
    expires: Natural
    """In microseconds since the epoch, by the clock of the node that signed it."""
    name: str = ""
    """The caller that planned the read, whose limits apply; empty where callers have no names."""

    def allows(self, ticket: ReadTicket) -> bool:
        """Whether the ticket permits a read."""
        since, upto = ticket.since, ticket.upto
        return (
            since is not None
            and upto is not None
            and not ticket.follow
            and since.log_id == self.log_id
            and self.first <= since.next <= upto <= self.next
        )


def sign_ticket(ticket: SpanTicket, key: bytes) -> str:
    """The ticket as text, for a header: its content and its signature.

    >>> ticket = SpanTicket(UUID(int=7), 0, 5, 1)
    >>> verify_ticket(sign_ticket(ticket, b"k"), [b"other", b"k"]) == ticket
    True
    """
    content = write_record(ticket)
    return f"{_text(content)}.{_text(_signature(content, key))}"


def verify_ticket(text: str, keys: Sequence[bytes]) -> SpanTicket | None:
    """The ticket in a text, if one of the keys has signed it."""
    if len(text) > _LONGEST:
        return None
    content, _, signature = text.partition(".")
    try:
        data, found = _bytes(content), _bytes(signature)
    except ValueError:
        return None
    if not any([hmac.compare_digest(_signature(data, key), found) for key in keys]):  # noqa: C419 - constant time
        return None
    try:
        return Fields.parse(data, "The ticket").record(SpanTicket)
    except InvalidInput:  # signed by another version
        return None


def _signature(content: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + content, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class TicketKey:
    """A key that signs tickets, or a former one that verifies them until a time."""

    key: bytes = field(repr=False)
    until: int | None = None
    """When it stops verifying, in microseconds since the epoch; None for the key that signs."""


def encode_keys(keys: Sequence[TicketKey]) -> bytes:
    """The file of the keys that a node knows."""
    return encode_checked(_KEYS_KIND, _KEYS_VERSION, dict(zip(("keys", "until"), key_columns(keys), strict=True)))


def decode_keys(data: bytes, where: str) -> tuple[TicketKey, ...]:
    """The keys in a file, or ``CorruptData``."""
    with damage(where, "Remove it: the primary has the keys."):
        fields = decode_checked(data, _KEYS_KIND, _KEYS_VERSION)
        return keys_of(fields["keys"], fields.get("until"))


def key_columns(keys: Sequence[TicketKey]) -> tuple[list[str], list[int | None]]:
    """The texts of keys, as earlier versions have them, and until when each verifies."""
    return [each.key.hex() for each in keys], [each.until for each in keys]


def keys_of(texts: object, until: object = None) -> tuple[TicketKey, ...]:
    """The inverse of :func:`key_columns`; ``ValueError`` for anything else. Earlier versions have no ``until``."""
    keys = tuple(map(bytes.fromhex, msgspec.convert(texts, list[str])))
    if any(len(key) != _KEY_BYTES for key in keys):
        raise ValueError(f"a key has {_KEY_BYTES} bytes")
    times = [None] * len(keys) if until is None else msgspec.convert(until, list[int | None])
    if len(times) != len(keys):
        raise ValueError("each key has the time until which it verifies")
    return tuple(map(TicketKey, keys, times))
