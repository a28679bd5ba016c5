"""Output of the ``verify`` commands: findings as JSON or as text, whichever log was verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.log.findings import FindingKind, Severity, Verification

SHOWN: Final = 20
"""How many findings of one kind are printed as text."""

_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.WASTE: "yellow", Severity.NOTE: "cyan"}
_WORDS: Final[dict[Severity, Callable[[int], str]]] = {
    Severity.DAMAGE: lambda count: f"{count:,} damaged" if count else "no damage",
    Severity.WASTE: lambda count: f"{count:,} to waste" if count else "no waste",
    Severity.NOTE: lambda count: show.counted(count, "note") if count else "no notes",
}


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
