"""``strandline segments``: list and draw the segments of a log's cold tier."""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import tierable_log
from strandline.cli.shared.common import Place, guarded
from strandline.cli.shared.groups import ListingGroup, group
from strandline.cli.shared.options import option
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentMetadata, SegmentState
from strandline.serve.tier_state import segment_fields
from strandline.tier.opening import cold_tier, follow_events
from strandline.tier.verify import TierView, look_at

segments = group(
    "List and draw the segments of a cold tier.\n\n**strandline segments LOG** lists them.", cls=ListingGroup
)

_NARROW: Final = 80
_LABEL: Final = 8
_FEWEST: Final = 10
_SEGMENTS: Final = "█▓"
"""Alternating shades, so that adjacent segments can be distinguished."""
_HOT: Final = "▒"
_PART: Final = "░"
_HOLE: Final = "!"
_UNDER_WAY: Final = {SegmentState.COPY_STARTED: "+", SegmentState.DELETE_STARTED: "-"}


def tier_seen(place: str) -> TierView:
    """The current cold tier of a log; ``NotFound`` if it has none, ``NotReady`` if it is unknown."""
    log = tierable_log(place)
    cold = cold_tier(log)
    with follow_events(cold) as manager:
        return look_at(log, cold, manager)


# --- list ------------------------------------------------------------------------------------------------------


_STYLES: Final = {"copy-started": "yellow", "copy-finished": "green", "delete-started": "red"}
"""The states of segments that are listed."""


@segments.command("list")
@guarded
def list_(
    log: Place,
    *,
    term: Annotated[int | None, option("TERM", "Only segments with records of this term.", min=0)] = None,
    state: Annotated[
        Literal["copy-started", "copy-finished", "delete-started"] | None,
        option("STATE", "Only segments in this state: copy-started, copy-finished or delete-started."),
    ] = None,
) -> None:
    """List the segments by first offset, from their events: offsets, size, state, terms, newest record, id.

    A segment whose copy has started is not read yet, and one whose deletion has started is not read any more. A
    superseded one holds only records that others hold, too, and the next round of the tierer removes it.

    Example: strandline segments list s3://bucket/orders
    """
    seen = tier_seen(log)
    spare = seen.known.spare
    rows = [
        row
        for row in (segment_fields(segment, spare) for segment in seen.known.segments)
        if state in (None, row["state"]) and (term is None or term in dict(row["terms"]))
    ]
    fields = {"url": seen.url, "store": seen.cold.store, "segments": rows}
    show.answer(fields, lambda: rendered(seen, rows))


def rendered(seen: TierView, rows: Sequence[dict[str, Any]]) -> RenderableType:
    """The text output."""
    table = show.table(">start", ">end", ">records", ">size", "state", "~terms", "newest record", "id")
    for row in rows:
        note = f"{row['state']}, superseded" if row["superseded"] else row["state"]
        table.add_row(
            f"{row['start']:,}",
            f"{row['end']:,}",
            f"{row['records']:,}",
            show.size(row["size"]),
            Text(note, "yellow" if row["superseded"] else _STYLES[row["state"]]),
            terms_of(row["terms"]),
            (row["max_timestamp"] or "-").replace("T", " ").removesuffix("Z"),
            row["id"],
        )
    of, records = show.counted(len(rows), "segment"), show.counted(sum(row["records"] for row in rows), "record")
    size = show.size(sum(row["size"] for row in rows))
    head = Text.assemble((seen.cold.store, "bold"), f"  {of}, {records}, {size}")
    return Group(head, table) if rows else head


def terms_of(terms: Sequence[tuple[int, int]]) -> str:
    """The terms of a segment, the later ones with their first offset.

    >>> terms_of([(3, 0)]), terms_of([(3, 0), (5, 1200)])
    ('3', '3, 5 from 1,200')
    """
    (first, _), *later = terms
    return ", ".join([str(first), *(f"{term} from {start:,}" for term, start in later)])


# --- map -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Offsets ``first`` up to ``next``, all in the same tiers; in neither, they are lost."""

    first: int
    next: int
    cold: bool
    hot: bool
    segments: int
    """Number of segments with some of them."""

    @property
    def where(self) -> str:
        """In words."""
        if self.cold:
            return "both" if self.hot else "cold"
        return "hot" if self.hot else "neither"


@segments.command("map")
@guarded
def map_(log: Place) -> None:
    """Draw which offsets are in which tier: segments in alternating shades, the hot tier below, and holes if any.

    Records in both tiers are read from the hot tier, until it trims them. Records in neither, between the two, are
    lost: no reader skips them by itself.

    Example: strandline segments map s3://bucket/orders
    """
    seen = tier_seen(log)
    found = stretches(seen.known.answering, seen.hot)
    if show.for_programs():
        show.document(_fields(seen, found))
        return
    out = show.out()
    first = found[0].first if found else seen.hot.first
    out.print(Text.assemble((seen.url, "bold"), f"  offsets {first:,} to {seen.hot.next:,}"), soft_wrap=True)
    if not found:
        out.print("no records, in neither tier")
        return
    columns = shutil.get_terminal_size((_NARROW, 24)).columns
    for label, row, style in picture(seen.known.segments, found, seen.hot, columns - _LABEL):
        out.print(Text.assemble((f"{label:<{_LABEL}}", "bold"), (row, style)), soft_wrap=True, crop=False)
    for line, style in _legend(found):
        out.print(Text(line, style), soft_wrap=True)


def _fields(seen: TierView, found: Sequence[Stretch]) -> dict[str, Any]:
    return {
        "url": seen.url,
        "first": found[0].first if found else seen.hot.first,
        "next": seen.hot.next,
        "hot": {"first": seen.hot.first, "next": seen.hot.next},
        "segments": len(seen.known.answering),
        "stretches": [{**asdict(stretch), "where": stretch.where} for stretch in found],
    }


def stretches(segments: Sequence[SegmentMetadata], hot: Bounds) -> list[Stretch]:
    """The offsets from the first retained one to the end, split where the tiers that hold them change.

    ``segments`` are the readable ones, by first offset.
    """
    cold: list[tuple[int, int]] = []
    for segment in segments:
        if cold and segment.start <= cold[-1][1]:
            cold[-1] = (cold[-1][0], max(cold[-1][1], segment.end + 1))
        else:
            cold.append((segment.start, segment.end + 1))
    cuts = sorted({hot.first, hot.next, *(offset for each in cold for offset in each)})
    starts = [segment.start for segment in segments]
    found = []
    for first, end in pairwise(cuts):
        is_cold = any(begin <= first < after for begin, after in cold)
        # Overlaps are rare and short: those that begin inside, and the one that holds the first offset.
        count = bisect_right(starts, end - 1) - bisect_right(starts, first) + 1 if is_cold else 0
        found.append(Stretch(first, end, is_cold, hot.first <= first < hot.next, count))
    return found


def picture(
    segments: Sequence[SegmentMetadata], found: Sequence[Stretch], hot: Bounds, columns: int
) -> list[tuple[str, str, str]]:
    """The rows of the picture: label, characters and style. Each column stands for equally many offsets.

    Even small ranges are visible: a part of a column is shaded, and a hole is always shown.
    """
    columns = max(_FEWEST, columns)
    first, end = found[0].first, found[-1].next
    total = end - first
    cells = [
        (first + at * total // columns, max(first + at * total // columns + 1, first + (at + 1) * total // columns))
        for at in range(columns)
    ]
    starts = [segment.start for segment in segments if segment.state is SegmentState.COPY_FINISHED]

    def cold(cell: tuple[int, int]) -> str:
        held = _held(cell, [(stretch.first, stretch.next) for stretch in found if stretch.cold])
        number = bisect_right(starts, cell[0]) - 1
        return _SEGMENTS[number % 2] if held == 1 else _PART if held else " "

    def recent(cell: tuple[int, int]) -> str:
        held = _held(cell, [(hot.first, hot.next)])
        return _HOT if held == 1 else _PART if held else " "

    edges = f"{first:,}", f"{end:,}"
    axis = edges[0] + " " * max(1, columns - len(edges[0]) - len(edges[1])) + edges[1]
    rows = [
        ("", axis, "dim"),
        ("cold", "".join(map(cold, cells)), "cyan"),
        ("hot", "".join(map(recent, cells)), "yellow"),
    ]
    holes = [(stretch.first, stretch.next) for stretch in found if stretch.where == "neither"]
    if holes:
        rows.append(("holes", "".join(_HOLE if _held(cell, holes) else " " for cell in cells), "bold red"))
    for state, mark in _UNDER_WAY.items():
        busy = [(segment.start, segment.end + 1) for segment in segments if segment.state is state]
        if busy:
            label = "copying" if state is SegmentState.COPY_STARTED else "delete"
            rows.append((label, "".join(mark if _held(cell, busy) else " " for cell in cells), "magenta"))
    return [(label, row.rstrip(), style) for label, row, style in rows]


def _held(cell: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> float:
    """Which part of a cell lies in ranges that do not overlap."""
    held = sum(max(0, min(cell[1], end) - max(cell[0], first)) for first, end in ranges)
    return min(1.0, held / (cell[1] - cell[0]))


def _legend(found: Sequence[Stretch]) -> list[tuple[str, str]]:
    wide = len(f"{found[-1].next:,}")
    lines = []
    for stretch in found:
        count = show.counted(stretch.next - stretch.first, "record")
        of = f" in {show.counted(stretch.segments, 'segment')}" if stretch.segments else ""
        offsets = f"{stretch.first:>{wide},} to {stretch.next - 1:>{wide},}"
        if stretch.where == "neither":
            lines.append((f"{'HOLE':<{_LABEL}}{offsets}  {count} in neither tier", "bold red"))
        else:
            lines.append((f"{stretch.where:<{_LABEL}}{offsets}  {count}{of}", "none"))
    return lines
