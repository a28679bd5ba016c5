"""The sources that an object log remembers: ingested logs and topics, Spark streams, series of jobs.

The log itself remembers a hash of a source's identity, and its position. The names of sources that it has ingested are
objects beside it: for people, and for nothing else.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from strandline.errors import NotFound, StorageError, Unsupported
from strandline.log.addressed import log_at
from strandline.log.contract import LogReading
from strandline.log.object.log import ObjectLog
from strandline.log.object.upload import Lister
from strandline.log.writers.source import is_source, source_writer
from strandline.model.addresses import Address
from strandline.model.arguments import checked, shown
from strandline.model.head import Head
from strandline.model.stamp import OpId

_NAMES: Final = "sources/"
_LONGEST: Final = 1000


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
    names = {}
    for item in hot.store.list(_NAMES):
        with contextlib.suppress(NotFound):  # forgotten meanwhile
            names[item.path.removeprefix(_NAMES)] = bytes(hot.store.get(item.path).data).decode(errors="replace")
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
    with contextlib.suppress(StorageError):
        hot.store.delete(f"{_NAMES}{source}")
    return known


def note_source(target: ObjectLog, source: Any) -> None:
    """Store the name of a source that is ingested for the first time. An ingest goes on without it."""
    name = next((found for field in ("url", "name") if isinstance(found := getattr(source, field, None), str)), None)
    note_name(target, source.log_id, name or repr(source))


def note_name(target: ObjectLog, source_id: UUID, name: str) -> None:
    """Store the name of a source. Its records are appended, too, if that fails."""
    with contextlib.suppress(StorageError):
        target.store.put(f"{_NAMES}{source_writer(str(source_id))}", [name[:_LONGEST].encode()])


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
