"""``strandline verify``: verify a log of any kind; and the output of all ``verify`` commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from strandline.bulk.audit import LogAudit
from strandline.bulk.verifying import verify as verify_log
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, LogPlace, on_any_log
from strandline.cli.shared.common import Json, object_log_at
from strandline.cli.shared.pools import Workers, is_on_spark, task_pool
from strandline.cli.shared.tables import followed_table
from strandline.errors import CorruptData, InvalidInput
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.maintain.verify import ObjectLogVerifier
from strandline.log.wal.names import firsts_in
from strandline.log.wal.recover.verify import verify as verify_wal
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK

SHOWN: Final = 20
"""Number of findings of one kind that are printed as text."""
_WORKERS: Final = 8
"""Batches of an object log that are read at once."""

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
        bool, typer.Option("--quick", help="Read no batches: only check that each exists and has its size.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read both tiers, and compare the records that both have.")
    ] = False,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="Also compare this table with the log; may be repeated. Implies --deep."),
    ] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Verify a log: each offset in one batch, each batch there and intact, slots in bounds, and nothing left over.

    Changes nothing, and the log may be used meanwhile. Findings are *damage* (something is lost or wrong), *waste*
    (an unneeded object takes up space) and *notes*. Ends with status 1 if there is damage. A write-ahead log is
    verified as by 'strandline wal verify'. The log of a node is read from it, whole: the node checks every batch as it
    reads it. 'strandline spark verify' reads with Spark's executors, as with --deep.

    Example: strandline verify s3://bucket/orders --quick
    """
    deep = deep or bool(table) or is_on_spark()
    if quick and deep:
        raise InvalidInput("--quick reads no batches, and --deep and --table read all of them: leave out one side.")
    if deep or place.is_node:
        with place.reading() as log:
            audit = audited(log, quick=quick, workers=workers, tables=table or (), quiet=json)
        found = audit.verification
        if place.folder is not None:
            found.take(verify_wal(place.folder, disk=DISK, clock=CLOCK).findings)
        finish(found, examined_by_reading(found, quick=quick), json=json, url=found.subject, quick=quick)
        return
    if place.folder is not None:
        if quick:
            raise InvalidInput("--quick is not for a write-ahead log: verifying it reads every byte.")
        verify_folder(place.folder, json=json)
        return
    found = verified_log(place.url, quick=quick, workers=workers or _WORKERS, quiet=json)
    finish(found, coverage(found, quick=quick), json=json, url=found.subject, quick=quick)


def audited(log: AnyLog, *, quick: bool, workers: int | None, tables: Sequence[str], quiet: bool) -> LogAudit:
    """Verify a log by reading both of its tiers and the tables, with a progress bar unless ``quiet``."""
    sinks = [followed_table(address, log) for address in tables]
    pool = task_pool(workers)
    with show.meter("planning batches" if quick else "reading records", total=None, quiet=quiet) as advance:
        tell = show.so_far(advance)
        return verify_log(log, pool=pool, tables=sinks, quick=quick, on_progress=lambda done, _: tell(done))


def verified_log(url: str, *, quick: bool, workers: int = 8, quiet: bool = False) -> Verification:
    """Verify the log at a URL, with a progress bar unless ``quiet``."""
    try:
        log = object_log_at(url)
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
    """Say which records and bytes were read."""
    seen = found.examined
    how = "planned, in order and without a gap" if quick else "read, each with its checksums"
    both = f", {seen['compared']:,} of them in both tiers" if seen["compared"] else ""
    rows = f", {show.counted(seen['rows'], 'row')} of tables" if seen["rows"] else ""
    return (
        f"{show.counted(seen['batches'], 'batch', 'batches')} {how}, with {show.counted(seen['records'], 'record')} "
        f"({show.size(seen['bytes'])}){both}{rows}, and {show.counted(seen['slots'], 'slot')}"
    )


def coverage(found: Verification, *, quick: bool) -> str:
    """Say what the verification covered."""
    seen = found.examined
    return (
        f"{show.counted(seen['batches'], 'batch', 'batches')} {'there' if quick else 'read'}, with "
        f"{show.counted(seen['records'], 'record')} ({show.size(seen['bytes'])}), "
        f"{show.counted(seen['chunks'], 'chunk')} and {show.counted(seen['slots'], 'slot')}"
    )


def data_bytes(folder: str) -> int:
    """The size of all data files of a write-ahead log, which is what verifying it reads."""
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

    ``looked`` is the sentence on what was examined; ``fields`` come first in the JSON document.
    """
    if json:
        show.document(
            {
                **fields,
                "clean": found.is_clean,
                **{str(severity): found.count(severity) for severity in Severity},
                "examined": dict(found.examined),
                "findings": [asdict(finding) for finding in found.findings],
            }
        )
    else:
        print_findings(found)
        verdict = ("clean", "bold green") if found.is_clean else ("DAMAGED", "bold red")
        show.say(Text.assemble(verdict, f": {summary(found, looked)}"))
    if not found.is_clean:
        raise typer.Exit(1)


def summary(found: Verification, looked: str) -> str:
    """What was examined, and the number of findings of each severity."""
    return f"{looked}; {', '.join(_WORDS[severity](found.count(severity)) for severity in Severity)}"


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
