"""Histories of snapshots: a log that was restored from a copy does not have the records of an earlier snapshot."""

from __future__ import annotations

from strandline.errors import Diverged
from strandline.log.contract import LogReading
from strandline.log.read.span_tasks import is_same_history
from strandline.model.cursor import Cursor
from strandline.model.snapshot import Artifact


def check_history(log: LogReading | None, cursor: Cursor) -> None:
    """``Diverged`` if the log does not have the records of a snapshot at this cursor; nothing without a log."""
    if log is not None and not is_same_history(log, cursor):
        raise Diverged(
            f"{log!r} does not have the records of a snapshot at {cursor}: it is another log, or was restored from a "
            "copy since. Nothing was published: build the store again, and publish that."
        )


def lost_location(log: LogReading | None, current: Artifact | None) -> str | None:
    """The location of the published snapshot, if it is of a history that the log has lost; otherwise None."""
    if log is None or current is None or current.cursor.log_id != log.log_id or is_same_history(log, current.cursor):
        return None
    return current.location
