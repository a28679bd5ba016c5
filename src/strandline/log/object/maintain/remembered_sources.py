"""The sources that an object log remembers: ingested logs and topics, Spark streams, series of jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from strandline.errors import NotFound, Unsupported
from strandline.log.addressed import log_at
from strandline.log.contract import LogReading
from strandline.log.object.log import ObjectLog
from strandline.log.object.source_names import forget_name, source_names
from strandline.log.object.upload import Lister
from strandline.log.writers.source import is_source
from strandline.model.addresses import Address
from strandline.model.arguments import checked, shown
from strandline.model.head import Head
from strandline.model.stamp import OpId


@dataclass(frozen=True, slots=True)
class RememberedSource:
    """A source, and the position up to which the log has its records."""

    id: UUID
    """Derived from the source's identity, which the log does not store."""
    position: int
    """Everything of the source below this is in the log."""
    last_offset: int
    """The offset of the last record that came from it."""
    listed: datetime | None
    """When that was listed; None for a time outside the calendar."""
    name: str | None = None
    """The address from which it was first ingested, or the names of its files; None for Spark streams and jobs."""


def sources(log: Address | LogReading) -> list[RememberedSource]:
    """The sources whose positions an object log remembers, in the order of their last appends.

    A log remembers 256 of them. ``Unsupported`` for other kinds of logs.
    """
    with log_at(log) as found:
        hot = _hot(found)
    names = source_names(hot.store)
    return [
        RememberedSource(
            writer, state.number, state.first + state.count - 1, _time(state.listed), names.get(str(writer))
        )
        for writer, state in sorted(hot.head().writers.items(), key=lambda item: item[1].sequence)
        if is_source(writer)
    ]


@checked
def forget_source(log: Address | LogReading, source: UUID) -> RememberedSource:
    """Forget a source that has ended, so that the log can remember another one; returns what was known of it.

    If the same source is ingested again, or a stream or job of the same name runs again, its records are appended
    again: the log no longer knows that it has them. ``NotFound`` if the log does not know the source.
    """
    with log_at(log) as found:
        hot = _hot(found)
    known = next((one for one in sources(hot) if one.id == source), None)
    if known is None:
        raise NotFound(f"{hot.url} remembers no source {source}: 'strandline sources list' shows those that it does.")

    def without(head: Head) -> Head:
        return replace(head, writers={writer: state for writer, state in head.writers.items() if writer != source})

    Lister(hot.store, hot.log_id, env=hot.env).cell.update(OpId(hot.env.chance.uuid()), without)
    forget_name(hot.store, source)
    return known


def _hot(log: LogReading) -> ObjectLog:
    hot = getattr(log, "hot", log)
    if not isinstance(hot, ObjectLog):
        raise Unsupported(f"Only object logs list their sources, and {shown(log)} is none.")
    return hot


def _time(microseconds: int) -> datetime | None:
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    except OverflowError:
        return None
