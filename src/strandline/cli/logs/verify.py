"""``strandline verify``: verify a log of any kind; and the output of all ``verify`` commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import pyarrow as pa
import typer
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, LogPlace, on_any_log
from strandline.cli.shared.common import Json, open_log
from strandline.errors import CorruptData, CursorExpired, InvalidInput, NotFound, NotReady
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.maintain.verify import ObjectLogVerifier
from strandline.log.read.planning import behind
from strandline.log.read.reading import fetch_in_order
from strandline.log.wal.names import firsts_in
from strandline.log.wal.recover.verify import verify as verify_wal
from strandline.model.cursor import Bounds, Limit, Span
from strandline.model.retention import SlotState
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK

SHOWN: Final = 20
"""Number of findings of one kind that are printed as text."""

_PLANNED: Final = 256

_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.WASTE: "yellow", Severity.NOTE: "cyan"}
_WORDS: Final[dict[Severity, Callable[[int], str]]] = {
    Severity.DAMAGE: lambda count: f"{count:,} damaged" if count else "no damage",
    Severity.WASTE: lambda count: f"{count:,} to waste" if count else "no waste",
    Severity.NOTE: lambda count: show.counted(count, "note") if count else "no notes",
}


@on_any_log
def verify(
    place: LogPlace,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read no batches: only look whether each is there and has its size.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="How many batches are read at once.")] = 8,
    json: Json = False,
) -> None:
    """Verify a log: each offset in one batch, each batch there and whole, slots in bounds, and nothing left over.

    Changes nothing, and the log may be used meanwhile. Findings are *damage* (something is lost or wrong), *waste*
    (an unneeded object takes up space) and *notes*. Ends with status 1 if there is damage. A write-ahead log is
    verified as by 'strandline wal verify'. The log of a node is read from it, whole: the node checks every batch as it
    reads it.
    """
    if place.folder is not None:
        if quick:
            raise InvalidInput("--quick is not for a write-ahead log: verifying it reads every byte.")
        verify_folder(place.folder, json=json)
        return
    if place.is_node:
        with place.reading() as log:
            found = read_everything(log, quick=quick, workers=workers, quiet=json)
        finish(found, examined_by_reading(found, quick=quick), json=json, url=found.subject, quick=quick)
        return
    found = look(place.url, quick=quick, workers=workers, quiet=json)
    finish(found, examined(found, quick=quick), json=json, url=found.subject, quick=quick)


def read_everything(log: AnyLog, *, quick: bool, workers: int = 8, quiet: bool = False) -> Verification:
    """Verify a log by reading it: each retained offset once and in order, each batch readable, slots in bounds.

    A batch that cannot be read is damage, and the next one follows. ``quick`` plans the batches and reads none.
    """
    found = Verification(log.url)
    slots = _slots_of(log)
    bounds = log.bounds()
    with show.meter("planning batches" if quick else "reading records", total=bounds.count, quiet=quiet) as advance:
        cursor = log.cursor_at(bounds.first)
        while cursor.next < bounds.next:
            try:
                spans = log.plan(cursor, Limit(batches=_PLANNED, upto=bounds.next))
            except CursorExpired:  # trimmed meanwhile
                cursor = log.cursor_at(max(cursor.next, log.bounds().first))
                continue
            found.take(_holes(log, cursor.next, spans, bounds.next))
            if not spans:
                break
            for piece, batches in fetch_in_order(() if quick else map(_ReadSpan, spans), workers=workers):
                found.take(piece.findings(log, batches))
                advance(piece.span.next - piece.span.first)
            found.examined.update(
                batches=len(spans),
                records=sum(span.next - span.first for span in spans),
                bytes=sum(span.size for span in spans),
            )
            cursor = behind(cursor, spans[-1])
    found.examined["slots"] = len(slots)
    found.take(_misplaced(slots, bounds))
    return found


def _slots_of(log: AnyLog) -> Sequence[SlotState]:
    try:
        return log.slots.list()
    except NotReady:  # a replica: only the primary has the slots of consumers
        return []


def _holes(log: AnyLog, since: int, spans: Sequence[Span], end: int) -> Iterator[Finding]:
    """The offsets that a plan has left out, or has twice."""
    for span in spans:
        if span.first != since:
            yield _damage(FindingKind.HOLE, log, f"{log.url} goes on with offset {span.first}, where {since} is next.")
        since = span.next
    if not spans:
        yield _damage(FindingKind.HOLE, log, f"Offsets {since} to {end - 1} of {log.url} are missing.")


def _misplaced(slots: Sequence[SlotState], bounds: Bounds) -> Iterator[Finding]:
    for state in slots:
        if state.pins and not bounds.first <= state.position <= bounds.next:
            what = f"Slot {state.name!r} is at {state.position}, outside of offsets {bounds.first} to {bounds.next}."
            yield Finding(Severity.DAMAGE, FindingKind.SLOT, state.name, what)


def _damage(kind: FindingKind, log: AnyLog, message: str) -> Finding:
    return Finding(Severity.DAMAGE, kind, log.url, message)


@dataclass(slots=True)
class _ReadSpan:
    """A span that is read; an error is kept, so that the next one is read, too."""

    span: Span
    error: CorruptData | NotFound | CursorExpired | None = None

    @property
    def size(self) -> int:
        return self.span.size

    def fetch(self, columns: object = None) -> list[pa.RecordBatch]:
        try:
            return list(self.span.fetch())
        except (CorruptData, NotFound, CursorExpired) as error:
            self.error = error
            return []

    def findings(self, log: AnyLog, batches: Sequence[pa.RecordBatch]) -> list[Finding]:
        first, end = self.span.first, self.span.next
        if isinstance(self.error, CursorExpired):
            return [Finding(Severity.NOTE, FindingKind.TRIM, log.url, f"Offsets {first} to {end - 1} were trimmed.")]
        if self.error is not None:
            what = f"Offsets {first} to {end - 1} of {log.url} cannot be read: {self.error}"
            return [_damage(FindingKind.BATCH, log, what)]
        given = [batch.column("offset") for batch in batches if batch.num_rows]
        if given and pa.concat_arrays(given).equals(pa.arange(first, end)):
            return []
        return [
            _damage(FindingKind.CONTINUITY, log, f"{log.url} gave other records than offsets {first} to {end - 1}.")
        ]


def look(url: str, *, quick: bool, workers: int = 8, quiet: bool = False) -> Verification:
    """Verify the log at a URL, with a progress bar unless ``quiet``."""
    try:
        log = open_log(url)
    except CorruptData as error:
        found = Verification(url)
        found.take([Finding(Severity.DAMAGE, FindingKind.IDENTITY, "log.json", str(error))])
        return found
    verifier = ObjectLogVerifier(log, quick=quick, workers=workers)
    try:
        total: int | None = verifier.expected()
    except CorruptData:
        total = None  # unknown: the head is damaged, which is a finding
    with show.meter("looking at batches" if quick else "reading batches", total=total, quiet=quiet) as advance:
        return verifier.run(advance)


def examined_by_reading(found: Verification, *, quick: bool) -> str:
    """What was examined of a node's log, in words."""
    seen = found.examined
    how = "planned, in order and without a gap" if quick else "read from the node, which checks their checksums"
    return (
        f"{show.counted(seen['batches'], 'batch', 'batches')} {how}, with {show.counted(seen['records'], 'record')} "
        f"({show.size(seen['bytes'])}), and {show.counted(seen['slots'], 'slot')}"
    )


def examined(found: Verification, *, quick: bool) -> str:
    """What was examined, in words."""
    seen = found.examined
    return (
        f"{show.counted(seen['batches'], 'batch', 'batches')} {'there' if quick else 'read'}, with "
        f"{show.counted(seen['records'], 'record')} ({show.size(seen['bytes'])}), "
        f"{show.counted(seen['chunks'], 'chunk')} and {show.counted(seen['slots'], 'slot')}"
    )


def data_bytes(folder: str) -> int:
    """Bytes of frames to read, as of now."""
    rows = DISK.scan(folder)
    return sum(row.size for row in rows if firsts_in([row]))


def verify_folder(folder: str, *, json: bool) -> None:
    """Verify a write-ahead log: every byte of its files, its indexes, slots and mark."""
    with show.meter("reading bytes", total=data_bytes(folder), quiet=json) as advance:
        found = verify_wal(folder, disk=DISK, clock=CLOCK, on_progress=advance)
    seen = found.examined
    looked = (
        f"{show.counted(seen['files'], 'file')} read, with {show.counted(seen['records'], 'record')} in "
        f"{show.counted(seen['frames'], 'frame')} ({show.size(seen['bytes'])}), and "
        f"{show.counted(seen['slots'], 'slot')}"
    )
    log_id = None if found.log_id is None else str(found.log_id)
    finish(found, looked, json=json, folder=folder, log_id=log_id, start=found.bounds.first, next=found.bounds.next)


# --- findings --------------------------------------------------------------------------------------------------


def finish(found: Verification, looked: str, *, json: bool, **fields: Any) -> None:
    """Print a verification, and end the command with status 1 if there is damage.

    ``looked`` says in words what was examined; ``fields`` come first in the JSON document.
    """
    if json:
        show.document(
            {
                **fields,
                "clean": found.is_clean,
                **{str(severity): found.count(severity) for severity in Severity},
                "looked_at": dict(found.examined),
                "findings": [asdict(finding) for finding in found.findings],
            }
        )
    else:
        print_findings(found)
        verdict = ("clean", "bold green") if found.is_clean else ("DAMAGED", "bold red")
        show.out().print(Text.assemble(verdict, f": {summary(found, looked)}"), soft_wrap=True)
    if not found.is_clean:
        raise typer.Exit(1)


def summary(found: Verification, looked: str) -> str:
    """What was examined, and the number of findings of each severity."""
    return f"{looked}; {', '.join(_WORDS[severity](found.count(severity)) for severity in Severity)}"


def print_findings(found: Verification) -> None:
    """Print the subject and its findings, the worst first, at most :data:`SHOWN` of each kind."""
    out = show.out()
    out.print(Text(found.subject, "bold"), soft_wrap=True)
    for severity in Severity:
        head = (f"{severity:>8}", _STYLES[severity])
        printed: Counter[FindingKind] = Counter()
        for finding in found.findings:
            if finding.severity is severity and printed[finding.kind] < SHOWN:
                printed[finding.kind] += 1
                out.print(Text.assemble(head, f"  {finding.message}"), soft_wrap=True)
        for kind, shown in printed.items():
            more = found.counts[severity, kind] - shown
            if more:
                out.print(Text.assemble(head, f"  … and {more:,} more about: {kind}"))
