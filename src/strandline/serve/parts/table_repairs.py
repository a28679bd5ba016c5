"""What an operator asks of one table: its dead letters, their replay, and a rebuild in the follower's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import InvalidInput, StrandlineError
from strandline.formats.json.records import record_fields, rows_of
from strandline.log.contract import cursor_of
from strandline.model.cursor import Limit, Start
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.rebuilding import rebuild_table
from strandline.tables.maintain.replay import Replayed

_SHOWN: Final = 100
"""Reasons, and letters, that are shown."""


@dataclass(frozen=True, slots=True)
class PlannedRebuild:
    """Which records a rebuild reads."""

    start: int
    upto: int


class TableRepairs:
    """The repairs of one table; each call opens a sink of its own."""

    def __init__(self, sink: Callable[[Any], MaintainedTable], slot: str | None) -> None:
        self._sink, self._slot = sink, slot
        self._wanted: tuple[Start | None] | None = None

    def letters(self, log: Any) -> dict[str, Any]:
        """The dead letters of what the table holds, by reason, those with most letters first."""
        found = self._sink(log).stored_letters(log)
        grouped = found.group_by("reason").aggregate([("offset", "count"), ("offset", "min"), ("offset", "max")])
        reasons = grouped.sort_by([("offset_count", "descending"), ("offset_min", "ascending")])
        return {
            "letters": found.num_rows,
            "reasons": [
                {
                    "reason": row["reason"],
                    "letters": row["offset_count"],
                    "first": row["offset_min"],
                    "last": row["offset_max"],
                }
                for row in reasons.slice(0, _SHOWN).to_pylist()
            ],
            "more_reasons": max(0, reasons.num_rows - _SHOWN),
            "first": [{**record_fields(row), "reason": row["reason"]} for row in rows_of(found.slice(0, _SHOWN))],
        }

    def replay(self, log: Any, *, dry_run: bool) -> Replayed:
        """Apply the letters that can become rows by now; the follower may run meanwhile."""
        return self._sink(log).replay_letters(log, dry_run=dry_run)

    def planned(self, log: Any, start: Start | None) -> PlannedRebuild:
        """What a rebuild would read; ``CursorExpired`` if the log no longer has it, ``NotFound`` without a table."""
        sink = self._sink(log)
        sink.meet(log)
        began = sink.start()
        first = log.cursor_at(began) if start is None else cursor_of(log, start)
        log.plan(first, Limit(batches=1))
        upto = log.end().next
        if first.next >= upto:
            raise InvalidInput(f"The log has no record from offset {first.next} on: the table would be empty.")
        return PlannedRebuild(first.next, upto)

    def want(self, start: Start | None) -> None:
        """Build the table again before it is followed the next time."""
        self._wanted = (start,)

    def rebuild_if_wanted(self, log: Any) -> None:
        """Build the table again, if that was asked; tried again if that may help, else given up: it is as it was."""
        wanted = self._wanted
        if wanted is None:
            return
        try:
            rebuild_table(self._sink(log), log, start=wanted[0], upto=None, slot=self._slot, is_verified=True)
        except StrandlineError as error:
            if not error.retryable:
                self._wanted = None
            raise
        self._wanted = None
