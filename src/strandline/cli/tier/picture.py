"""``strandline segments map``: shows which offsets are in which tier."""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.tier.shared import Place, TierView, look
from strandline.model.cursor import Bounds
from strandline.model.segments import SegmentMetadata, SegmentState

_NARROW: Final = 80
_LABEL: Final = 8
_FEWEST: Final = 10
_SEGMENTS: Final = "█▓"
"""In turns, so that one is told from the next."""
_HOT: Final = "▒"
_PART: Final = "░"
_HOLE: Final = "!"
_UNDER_WAY: Final = {SegmentState.COPY_STARTED: "+", SegmentState.DELETE_STARTED: "-"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Offsets ``first`` up to ``next``, all of them in the same tiers; in neither, they are lost."""

    first: int
    next: int
    cold: bool
    hot: bool
    segments: int
    """How many segments hold something of it."""

    @property
    def where(self) -> str:
        """In words."""
        match self.cold, self.hot:
            case True, True:
                return "both"
            case True, False:
                return "cold"
            case False, True:
                return "hot"
            case _:
                return "neither"


@guarded
def map_(
    log: Place,
    *,
    width: Annotated[
        int | None,
        typer.Option(min=20, help="How many columns the picture has; by default those of the terminal."),
    ] = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Draw which offsets are in which tier: segments in turns of shade, the hot tier below, and holes if there are any.

    What is in both is read from the hot tier, until that forgets it. What is in neither, between the two, is lost: no
    reader passes it by itself.
    """
    seen = look(log)
    found = stretches(seen.finished, seen.hot)
    if json:
        show.document(_fields(seen, found))
        return
    out = show.out()
    first = found[0].first if found else seen.hot.first
    out.print(Text.assemble((seen.url, "bold"), f"  offsets {first:,} to {seen.hot.next:,}"), soft_wrap=True)
    if not found:
        out.print("no records, in neither tier")
        return
    columns = width or shutil.get_terminal_size((_NARROW, 24)).columns
    for label, row, style in picture(seen.segments, found, seen.hot, columns - _LABEL):
        out.print(Text.assemble((f"{label:<{_LABEL}}", "bold"), (row, style)), soft_wrap=True, crop=False)
    for line, style in _legend(found):
        out.print(Text(line, style), soft_wrap=True)


def _fields(seen: TierView, found: Sequence[Stretch]) -> dict[str, Any]:
    return {
        "url": seen.url,
        "first": found[0].first if found else seen.hot.first,
        "next": seen.hot.next,
        "hot": {"first": seen.hot.first, "next": seen.hot.next},
        "segments": len(seen.finished),
        "stretches": [{**asdict(stretch), "where": stretch.where} for stretch in found],
    }


def stretches(segments: Sequence[SegmentMetadata], hot: Bounds) -> list[Stretch]:
    """The offsets from the first that is anywhere to the end, cut where the tiers that hold them change.

    ``segments`` are those that can be read, by their first offset.
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
    """The rows of the picture: label, characters and style. A column stands for equally many offsets each.

    What is smaller than a column is seen all the same: part of a column is shaded, and a hole is a hole.
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
            label = "copying" if state is SegmentState.COPY_STARTED else "going"
            rows.append((label, "".join(mark if _held(cell, busy) else " " for cell in cells), "magenta"))
    return [(label, row.rstrip(), style) for label, row, style in rows]


def _held(cell: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> float:
    """Which part of a cell lies in ranges that do not overlap, or touch more than one of them."""
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
