"""``strandline verify``: is everything there, whole, and once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from strandline.cli import show
from strandline.cli.frame import Debug, Json, Url, guarded, open_log
from strandline.log.findings import Severity
from strandline.log.object.checks import Finding, Kind
from strandline.log.object.verify import Verification, Verified
from strandline.model.errors import CorruptData

_SHOWN: Final = 20
_SHOWN_JSON: Final = 1000
_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.WASTE: "yellow", Severity.NOTE: "cyan"}


@dataclass(slots=True)
class Report:
    """What was found. Of many findings of one kind only the first are kept: a million orphans are one line."""

    url: str
    quick: bool
    looked_at: Verified
    most: int
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[Severity, Kind]] = field(default_factory=Counter)

    def take(self, findings: Iterable[Finding]) -> None:
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

    def fields(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "url": self.url,
            "clean": self.is_clean,
            "quick": self.quick,
            **{str(severity): self.of(severity) for severity in Severity},
            "looked_at": asdict(self.looked_at),
            "findings": [asdict(finding) for finding in self.findings],
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
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Verify a log: each offset in one batch, each batch there and whole, slots in bounds, and nothing left over.

    Changes nothing, and the log may be used meanwhile. Findings are *damage* (something is lost or wrong), *waste*
    (something takes up room that nobody needs) and *notes*. Ends with status 1 if there is damage.
    """
    report = look(url, quick=quick, workers=workers, as_json=json)
    if json:
        show.document(report.fields())
    else:
        _print(report)
    if not report.is_clean:
        raise typer.Exit(1)


def look(url: str, *, quick: bool, workers: int = 8, as_json: bool = False) -> Report:
    """Verify the log at an address, with progress."""
    most = _SHOWN_JSON if as_json else _SHOWN
    try:
        log = open_log(url)
    except CorruptData as error:
        report = Report(url, quick, Verified(), most)
        report.take([Finding(Severity.DAMAGE, Kind.IDENTITY, "log.json", str(error))])
        return report
    looking = Verification(log, quick=quick, workers=workers)
    report = Report(log.url, quick, looking.done, most)
    try:
        total: int | None = looking.expected()
    except CorruptData:
        total = None  # the findings say so
    with show.meter("looking at batches" if quick else "reading batches", total=total, quiet=as_json) as advance:
        report.take(looking.findings(advance))
    return report


def _print(report: Report) -> None:
    out = show.out()
    out.print(Text(report.url, "bold"))
    for severity in Severity:
        for finding in report.findings:
            if finding.severity is severity:
                out.print(Text.assemble((f"{severity:>8}", _STYLES[severity]), f"  {finding.message}"), soft_wrap=True)
        for (found, kind), count in report.counts.items():
            if found is severity and count > report.most:
                more = f"  … and {count - report.most:,} more about: {kind}"
                out.print(Text.assemble((f"{severity:>8}", _STYLES[severity]), more))
    out.print(Text.assemble(("clean", "bold green") if report.is_clean else ("DAMAGED", "bold red"), summary(report)))


def summary(report: Report) -> str:
    """The last line, behind its first word."""
    seen = report.looked_at
    how = "there" if report.quick else "read"
    looked = (
        f": {show.counted(seen.batches, 'batch', 'batches')} {how}, with {show.counted(seen.records, 'record')} "
        f"({show.size(seen.bytes)}), {show.counted(seen.chunks, 'chunk')} and {show.counted(seen.slots, 'slot')}"
    )
    return looked + "; " + ", ".join(_counted(report, severity) for severity in Severity)


def _counted(report: Report, severity: Severity) -> str:
    count = report.of(severity)
    words: dict[Severity, Callable[[int], str]] = {
        Severity.DAMAGE: lambda count: f"{count:,} damaged" if count else "no damage",
        Severity.WASTE: lambda count: f"{count:,} to waste" if count else "no waste",
        Severity.NOTE: lambda count: show.counted(count, "note") if count else "no notes",
    }
    return words[severity](count)
