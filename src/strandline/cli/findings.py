"""What verifying found, counted and printed: the same for whatever was verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from rich.text import Text

from strandline.cli import output as show
from strandline.log.findings import Severity

SHOWN: Final = 20
"""So many findings of one kind are printed,"""
SHOWN_JSON: Final = 1000
"""and so many as JSON."""

_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.WASTE: "yellow", Severity.NOTE: "cyan"}
_WORDS: Final[dict[Severity, Callable[[int], str]]] = {
    Severity.DAMAGE: lambda count: f"{count:,} damaged" if count else "no damage",
    Severity.WASTE: lambda count: f"{count:,} to waste" if count else "no waste",
    Severity.NOTE: lambda count: show.counted(count, "note") if count else "no notes",
}


class Found(Protocol):
    """One thing that was found."""

    @property
    def severity(self) -> Severity:
        """How bad it is."""

    @property
    def kind(self) -> str:
        """What it is about."""

    @property
    def where(self) -> str:
        """The object that it is about."""

    @property
    def message(self) -> str:
        """One sentence that says what, and what to do."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found. Of many findings of one kind only the first are kept: a million orphans are one line."""

    most: int
    findings: list[Found] = field(default_factory=list)
    counts: Counter[tuple[Severity, str]] = field(default_factory=Counter)

    def take(self, findings: Iterable[Found]) -> None:
        """Count findings, and keep some of each kind."""
        for finding in findings:
            group = (finding.severity, finding.kind)
            self.counts[group] += 1
            if self.counts[group] <= self.most:
                self.findings.append(finding)

    def of(self, severity: Severity) -> int:
        """How many there are of a severity."""
        return sum(count for (found, _), count in self.counts.items() if found is severity)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is damaged."""
        return not self.of(Severity.DAMAGE)

    def fields_of_each(self) -> list[dict[str, str]]:
        """The findings that were kept, for ``--json``."""
        return [
            {"severity": each.severity, "kind": each.kind, "where": each.where, "message": each.message}
            for each in self.findings
        ]

    def counted(self) -> str:
        """How many there are of each severity, in words."""
        return ", ".join(_WORDS[severity](self.of(severity)) for severity in Severity)

    def show(self, title: str, summary: str) -> None:
        """Print all of it, the worst first; the summary stands behind the last line's first word."""
        out = show.out()
        out.print(Text(title, "bold"), soft_wrap=True)
        for severity in Severity:
            head = (f"{severity:>8}", _STYLES[severity])
            for finding in self.findings:
                if finding.severity is severity:
                    out.print(Text.assemble(head, f"  {finding.message}"), soft_wrap=True)
            for (found, kind), count in self.counts.items():
                if found is severity and count > self.most:
                    out.print(Text.assemble(head, f"  … and {count - self.most:,} more about: {kind}"))
        verdict = ("clean", "bold green") if self.is_clean else ("DAMAGED", "bold red")
        out.print(Text.assemble(verdict, summary), soft_wrap=True)
