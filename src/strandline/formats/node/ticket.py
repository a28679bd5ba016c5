"""Flight tickets: the stream that a client requests, as a small JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from strandline.formats.json.fields import Fields, write_record
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
    upto: int | None = None
    """None for the current end; with ``follow``, for no end."""
    follow: bool = False
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class FeedTicket:
    """Log batches for a replica, up to the durable end, without an end."""

    replica: PlainName
    term: int
    since: Cursor


@dataclass(frozen=True, slots=True)
class ReportTicket:
    """A replica's acknowledgements."""

    replica: PlainName


@dataclass(frozen=True, slots=True)
class FileTicket:
    """A piece of a snapshot's file: from a byte on, about ``limit`` bytes."""

    replica: PlainName
    term: int
    snapshot: PlainName
    path: str
    offset: int
    limit: int


Ticket: TypeAlias = ReadTicket | FeedTicket | ReportTicket | FileTicket


def encode_ticket(ticket: Ticket) -> bytes:
    """The bytes of a ticket."""
    return write_record(ticket)


def decode_ticket(data: bytes | memoryview) -> Ticket:
    """Decode a ticket; ``InvalidInput`` if it cannot be read. No bytes request the whole log."""
    fields = Fields.parse(data or b"{}", "The ticket")
    if "snapshot" in fields:
        fields.only("replica", "term", "snapshot", "path", "offset", "limit")
        return fields.record(FileTicket)
    if "replica" in fields:
        fields.only("replica", "term", "since")
        if "term" not in fields and "since" not in fields:
            return fields.record(ReportTicket)
        return fields.record(FeedTicket)
    fields.only("since", "upto", "follow", "columns")
    return fields.record(ReadTicket, follow=fields.flag("follow"))
