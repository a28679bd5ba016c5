"""``strandline verify``: verify an object log; and the output of all ``verify`` commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Json, Url, guarded, open_log
from strandline.errors import CorruptData
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.maintain.verify import ObjectLogVerifier

SHOWN: Final = 20
"""Number of findings of one kind that are printed as text."""

_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.WASTE: "yellow", Severity.NOTE: "cyan"}
_WORDS: Final[dict[Severity, Callable[[int], str]]] = {
    Severity.DAMAGE: lambda count: f"{count:,} damaged" if count else "no damage",
    Severity.WASTE: lambda count: f"{count:,} to waste" if count else "no waste",
    Severity.NOTE: lambda count: show.counted(count, "note") if count else "no notes",
}


@guarded
def verify(
    url: Url,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read no batches: only look whether each is there and has its size.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="How many batches are read at once.")] = 8,
    json: Json = False,
) -> None:
    """Verify a log: each offset in one batch, each batch there and whole, slots in bounds, and nothing left over.

    Changes nothing, and the log may be used meanwhile. Findings are *damage* (something is lost or wrong), *waste*
    (an unneeded object takes up space) and *notes*. Ends with status 1 if there is damage.
    """
    found = look(url, quick=quick, workers=workers, quiet=json)
    finish(found, examined(found, quick=quick), json=json, url=found.subject, quick=quick)


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


def examined(found: Verification, *, quick: bool) -> str:
    """What was examined, in words."""
    seen = found.examined
    return (
        f"{show.counted(seen['batches'], 'batch', 'batches')} {'there' if quick else 'read'}, with "
        f"{show.counted(seen['records'], 'record')} ({show.size(seen['bytes'])}), "
        f"{show.counted(seen['chunks'], 'chunk')} and {show.counted(seen['slots'], 'slot')}"
    )


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
