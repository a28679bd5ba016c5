"""``strandline verify``: verify a log of any kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.text import Text

from strandline.bulk.verifying import verify as verify_log
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt, LogPlace
from strandline.cli.shared.common import Workers, connecting
from strandline.cli.shared.options import flag, option
from strandline.cli.shared.pools import task_pool
from strandline.cli.shared.tables import RowOptions
from strandline.errors import CorruptData, InvalidInput, NotALog, Unsupported
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.recover.verify import verify as verify_wal
from strandline.storage.env import SYSTEM

SHOWN: Final = 20
"""Number of findings of one kind that are printed as text."""

_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.WASTE: "yellow", Severity.NOTE: "cyan"}
_WORDS: Final[dict[Severity, Callable[[int], str]]] = {
    Severity.DAMAGE: lambda count: f"{count:,} damaged" if count else "no damage",
    Severity.WASTE: lambda count: f"{count:,} to waste" if count else "no waste",
    Severity.NOTE: lambda count: show.counted(count, "note") if count else "no notes",
}


@connecting
def verify(
    place: AnyLogAt,
    *,
    quick: Annotated[
        bool, flag("Read no records: only check that each object exists and has its size.", "--quick")
    ] = False,
    table: Annotated[
        list[str] | None, option("TABLE", "Also compare this table with the log; may be repeated.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Verify a log: each offset once and in order, each record intact.

    Slots have to be in bounds, too, and nothing left over. Reads both tiers, whole, and compares the records that both
    have; of a write-ahead log every byte of its files. The log of a node is read from it. Changes nothing, takes no
    lock, and the log may be used meanwhile. Findings are *damage* (something is lost or wrong), *waste* (an unneeded
    object takes up space) and *notes*. Ends with status 1 if there is damage.

    Example: strandline verify s3://bucket/orders --quick
    """
    if quick and table:
        raise InvalidInput("--quick reads no records, and --table reads all of them: leave out one of the two.")
    with ExitStack() as held:
        try:
            log = opened(place, held)
        except (CorruptData, NotALog) as error:
            found = unopened(place, error)
        else:
            found = verified(log, quick=quick, workers=workers, tables=table or ())
    if show.for_programs():
        show.document(
            {
                "url": found.subject,
                "log_id": None if found.log_id is None else str(found.log_id),
                "quick": quick,
                **asdict(found.bounds),
                "clean": found.is_clean,
                **{str(severity): found.count(severity) for severity in Severity},
                "examined": dict(found.examined),
                "findings": [asdict(finding) for finding in found.findings],
            }
        )
    else:
        print_findings(found)
        verdict = ("clean", "bold green") if found.is_clean else ("DAMAGED", "bold red")
        show.say(Text.assemble(verdict, f": {summary(found, quick=quick)}"))
    if not found.is_clean:
        raise typer.Exit(1)


def opened(place: LogPlace, held: ExitStack) -> AnyLog:
    """The log, for reading; a node's own copy without the cold tier, which is the primary's."""
    try:
        return held.enter_context(place.reading())
    except Unsupported:
        if place.folder is None:
            raise
        return WalReader(place.folder)


def unopened(place: LogPlace, error: CorruptData | NotALog) -> Verification:
    """The damage of a log that cannot be opened; raises the error if there is no log."""
    if place.folder is not None:
        return verify_wal(place.folder, env=SYSTEM)
    if isinstance(error, NotALog):
        raise error
    found = Verification(place.url)
    found.take([Finding(Severity.DAMAGE, FindingKind.IDENTITY, "log.json", str(error))])
    return found


def verified(log: AnyLog, *, quick: bool, workers: int | None, tables: Sequence[str]) -> Verification:
    """Verify a log and tables that follow it, with a progress bar."""
    sinks = [RowOptions().sink(address, log) for address in tables]
    pool = task_pool(workers)
    with show.meter("planning batches" if quick else "reading", total=None) as work:
        return verify_log(log, pool=pool, tables=sinks, quick=quick, on_progress=work.upto)


def summary(found: Verification, *, quick: bool) -> str:
    """What was examined, and the number of findings of each severity."""
    seen = found.examined
    looked = f"{show.counted(seen['records'], 'record')} {'listed' if quick else 'read'} ({show.size(seen['bytes'])})"
    if seen["compared"]:
        looked += f", {seen['compared']:,} of them in both tiers"
    parts = [show.counted(seen[name], *words) for name, words in _EXAMINED.items() if seen[name]]
    counts = ", ".join(_WORDS[severity](found.count(severity)) for severity in Severity)
    return f"{', '.join([looked, *parts])}; {counts}"


_EXAMINED: Final = {
    "batches": ("batch", "batches"),
    "files": ("file",),
    "frames": ("frame",),
    "segments": ("segment",),
    "chunks": ("chunk",),
    "slots": ("slot",),
    "rows": ("row of tables", "rows of tables"),
}
"""What is counted besides records, with the words for one and for many."""


def print_findings(found: Verification) -> None:
    """Print the subject and its findings, the worst first, at most :data:`SHOWN` of each kind."""
    show.say(Text(found.subject, "bold"))
    for severity in Severity:
        head = (f"{severity:>8}", _STYLES[severity])
        printed: Counter[FindingKind] = Counter()
        for finding in found.findings:
            if finding.severity is severity and printed[finding.kind] < SHOWN:
                printed[finding.kind] += 1
                show.say(Text.assemble(head, f"  {finding.message}"))
        for kind, shown in printed.items():
            more = found.counts[severity, kind] - shown
            if more:
                show.say(Text.assemble(head, f"  … and {more:,} more about: {kind}"))
