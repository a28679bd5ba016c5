"""Progress of a route and of its tables, as values; and how a route is followed."""

from __future__ import annotations

import html
from dataclasses import dataclass, field, fields
from typing import Literal

from strandline.followers.events import Batching
from strandline.model.cursor import Start

State = Literal["following", "catching up", "failing", "stopped"]


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """Progress of one table of a route since its follower was started."""

    name: str
    state: State
    """``following`` with the others; ``catching up`` alone; ``failing``, and tried again; ``stopped``: it is fenced."""
    next: int | None
    """Offsets below are in the table; None: unknown, it was never opened."""
    commits: int = 0
    records: int = 0
    """Records of the log that the table took."""
    bad_records: int = 0
    """Those of them that became dead letters."""
    seconds: float = 0.0
    """Duration of its last commit."""
    error: str = ""
    """Why it fails."""
    upkeep_failures: int = 0
    """Rounds of its upkeep that failed, and are tried again; the table goes on."""


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """How a route is followed."""

    start: Start = "beginning"
    repair: bool = False
    slot: str | None = None
    holder: str = ""
    batching: Batching = field(default_factory=Batching)
    upto: int | None = None


@dataclass(frozen=True, slots=True)
class RouteProgress:
    """Progress of a route since its follower was started."""

    tables: tuple[MemberProgress, ...] = ()
    unrouted: int = 0
    """Records that no table took."""
    read: int = 0
    """Offsets below were read for the foremost tables."""
    lag: int | None = None
    """Records of the log that the slowest table has not passed; None: unknown."""

    @property
    def records(self) -> int:
        """Records that the tables took."""
        return sum(one.records for one in self.tables)

    def line(self) -> str:
        """One line for operators.

        >>> RouteProgress((MemberProgress("a", "following", 9, 1, 9), MemberProgress("b", "failing", 4)), 2, 9).line()
        '9 records in 1 commits to 2 tables (1 failing: b at 4), read up to 9, 2 unrouted'
        """
        commits = sum(one.commits for one in self.tables)
        words = f"{self.records:,} records in {commits:,} commits to {len(self.tables):,} tables"
        notes = []
        for state in ("catching up", "failing", "stopped"):
            found = [one for one in self.tables if one.state == state]
            if found:
                shown = ", ".join(f"{one.name} at {'?' if one.next is None else one.next}" for one in found[:3])
                notes.append(f"{len(found)} {state}: {shown}{', …' if len(found) > 3 else ''}")  # noqa: PLR2004
        behind = f" ({'; '.join(notes)})" if notes else ""
        rest = f", {self.unrouted:,} unrouted" if self.unrouted else ""
        lag = "" if self.lag is None else f", {self.lag:,} records behind"
        return f"{words}{behind}, read up to {self.read:,}{rest}{lag}"

    def _repr_html_(self) -> str:
        """A table with a row for each table, for notebooks."""
        names = [one.name for one in fields(MemberProgress)]
        heads = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in names)
        rows = [[html.escape(str(getattr(one, name))) for name in names] for one in self.tables]
        cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<p>{html.escape(self.line())}</p><table><tr>{heads}</tr>{cells}</table>"
