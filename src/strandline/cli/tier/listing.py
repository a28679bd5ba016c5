"""``strandline segments list``: lists the segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.tier.shared import Place, TierView, look
from strandline.model.segments import SegmentMetadata, SegmentState


class State(StrEnum):
    """How far a segment is."""

    COPY_STARTED = "copy-started"
    COPY_FINISHED = "copy-finished"
    DELETE_STARTED = "delete-started"


_STYLES: Final = {State.COPY_STARTED: "yellow", State.COPY_FINISHED: "green", State.DELETE_STARTED: "red"}


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One segment as it is listed. ``end`` is its last offset; ``terms`` tells where each of its terms starts."""

    start: int
    end: int
    records: int
    size: int
    state: State
    superseded: bool
    terms: tuple[tuple[int, int], ...]
    max_timestamp: str | None
    id: str

    @classmethod
    def of(cls, segment: SegmentMetadata, seen: TierView) -> SegmentRow:
        """A segment among all that are known."""
        is_finished = segment.state is SegmentState.COPY_FINISHED
        return cls(
            start=segment.start,
            end=segment.end,
            records=segment.end - segment.start + 1,
            size=segment.size,
            state=State[segment.state.name],
            superseded=is_finished and segment.segment in seen.spare,
            terms=segment.terms,
            max_timestamp=moment(segment.max_timestamp),
            id=str(segment.segment.id),
        )


@guarded
def list_(
    log: Place,
    *,
    term: Annotated[
        int | None, typer.Option(min=0, help="Only segments with records of this term.", show_default=False)
    ] = None,
    state: Annotated[State | None, typer.Option(help="Only segments in this state.", show_default=False)] = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """List the segments by their first offset, as their events tell: offsets, size, state, terms, newest record, id.

    A segment whose copy has started is not read yet, and one whose deletion has started no more. One that is
    superseded holds only what others hold, too, and the next round of the tierer removes it.
    """
    seen = look(log)
    rows = [row for segment in seen.segments if _is_wanted(row := SegmentRow.of(segment, seen), term, state)]
    if json:
        show.document({"url": seen.url, "store": seen.cold.store, "segments": [asdict(row) for row in rows]})
    else:
        show.out().print(rendered(seen, rows))


def _is_wanted(row: SegmentRow, term: int | None, state: State | None) -> bool:
    return state in (None, row.state) and (term is None or any(term == has for has, _ in row.terms))


def rendered(seen: TierView, rows: Sequence[SegmentRow]) -> RenderableType:
    """The table that people see."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("start", "end", "records", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("state", "terms", "newest record", "id"):
        table.add_column(name, no_wrap=name != "terms")
    for row in rows:
        note = f"{row.state}, superseded" if row.superseded else str(row.state)
        table.add_row(
            f"{row.start:,}",
            f"{row.end:,}",
            f"{row.records:,}",
            show.size(row.size),
            Text(note, "yellow" if row.superseded else _STYLES[row.state]),
            terms_of(row.terms),
            (row.max_timestamp or "-").replace("T", " ").removesuffix("Z"),
            row.id,
        )
    of = show.counted(len(rows), "segment")
    total = f"{of}, {show.counted(sum(row.records for row in rows), 'record')}, {show.size(sum(r.size for r in rows))}"
    head = Text.assemble((seen.cold.store, "bold"), f"  {total}")
    return Group(head, table) if rows else head


def terms_of(terms: Sequence[tuple[int, int]]) -> str:
    """The terms of a segment, the later ones with where they start.

    >>> terms_of([(3, 0)]), terms_of([(3, 0), (5, 1200)])
    ('3', '3, 5 from 1,200')
    """
    (first, _), *later = terms
    return ", ".join([str(first), *(f"{term} from {start:,}" for term, start in later)])


def moment(milliseconds: int) -> str | None:
    """A time of the events, UTC; None if there is none.

    >>> moment(1_700_000_000_123), moment(-1)
    ('2023-11-14T22:13:20.123Z', None)
    """
    if milliseconds == -1:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    except (ValueError, OverflowError, OSError):  # records carry whatever time they were given
        return f"{milliseconds} ms"
