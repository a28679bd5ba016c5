"""Tickets: what a Flight client asks to be streamed, as a small JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from strandline.formats.json.fields import Fields, write_fields
from strandline.model.cursor import Cursor


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """Records with their offsets, up to what is committed.

    >>> encode_ticket(ReadTicket(follow=True))
    b'{"since":null,"upto":null,"follow":true,"columns":null}'
    >>> decode_ticket(b'{"columns": ["offset", "value"]}').columns
    ('offset', 'value')
    """

    since: Cursor | None = None
    """None for everything that is retained."""
    upto: int | None = None
    """None for the end as of now, or never if it follows."""
    follow: bool = False
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class FeedTicket:
    """Log batches for a replica, up to what is durable, without an end."""

    replica: str
    term: int
    since: Cursor


@dataclass(frozen=True, slots=True)
class ReportTicket:
    """A replica's reports of its progress."""

    replica: str


@dataclass(frozen=True, slots=True)
class FileTicket:
    """A piece of a snapshot's file: from a byte on, about ``limit`` bytes."""

    replica: str
    term: int
    snapshot: str
    path: str
    offset: int
    limit: int


Ticket: TypeAlias = ReadTicket | FeedTicket | ReportTicket | FileTicket


def encode_ticket(ticket: Ticket) -> bytes:
    """The bytes of a ticket."""
    fields: dict[str, Any]
    match ticket:
        case ReadTicket(since, upto, follow, columns):
            fields = {"since": since and str(since), "upto": upto, "follow": follow, "columns": columns}
        case FeedTicket(replica, term, since):
            fields = {"replica": replica, "term": term, "since": str(since)}
        case ReportTicket(replica):
            fields = {"replica": replica}
        case FileTicket(replica, term, snapshot, path, offset, limit):
            fields = {"replica": replica, "term": term, "snapshot": snapshot, "path": path, "offset": offset}
            fields["limit"] = limit
    return write_fields(fields)


def decode_ticket(data: bytes | memoryview) -> Ticket:
    """What is asked for; ``InvalidInput`` if that cannot be told. No bytes at all ask for the whole log."""
    fields = Fields.parse(data or b"{}", "The ticket")
    if "snapshot" in fields:
        fields.only("replica", "term", "snapshot", "path", "offset", "limit")
        return FileTicket(
            fields.name("replica"),
            fields.natural("term"),
            fields.name("snapshot"),
            fields.text("path"),
            fields.natural("offset"),
            fields.natural("limit"),
        )
    if "replica" in fields:
        fields.only("replica", "term", "since")
        if "term" not in fields and "since" not in fields:
            return ReportTicket(fields.name("replica"))
        return FeedTicket(fields.name("replica"), fields.natural("term"), fields.cursor("since"))
    fields.only("since", "upto", "follow", "columns")
    return ReadTicket(
        fields.maybe_cursor("since"), fields.maybe_natural("upto"), fields.flag("follow"), fields.texts("columns")
    )
