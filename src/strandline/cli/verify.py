"""``strandline verify``: is everything there, whole, and once?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, Url, guarded, open_log
from strandline.cli.findings import SHOWN, SHOWN_JSON, Findings
from strandline.errors import CorruptData
from strandline.log.findings import Severity
from strandline.log.object.maintain.checks import Finding, Kind
from strandline.log.object.maintain.verify import Verification, Verified


@dataclass(slots=True)
class Report(Findings):
    """What was found in a log."""

    url: str
    quick: bool
    looked_at: Verified

    def fields(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "url": self.url,
            "clean": self.is_clean,
            "quick": self.quick,
            **{str(severity): self.of(severity) for severity in Severity},
            "looked_at": asdict(self.looked_at),
            "findings": self.fields_of_each(),
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
        report.show(report.url, summary(report))
    if not report.is_clean:
        raise typer.Exit(1)


def look(url: str, *, quick: bool, workers: int = 8, as_json: bool = False) -> Report:
    """Verify the log at an address, with progress."""
    most = SHOWN_JSON if as_json else SHOWN
    try:
        log = open_log(url)
    except CorruptData as error:
        report = Report(url, quick, Verified(), most=most)
        report.take([Finding(Severity.DAMAGE, Kind.IDENTITY, "log.json", str(error))])
        return report
    looking = Verification(log, quick=quick, workers=workers)
    report = Report(log.url, quick, looking.done, most=most)
    try:
        total: int | None = looking.expected()
    except CorruptData:
        total = None  # the findings say so
    with show.meter("looking at batches" if quick else "reading batches", total=total, quiet=as_json) as advance:
        report.take(looking.findings(advance))
    return report


def summary(report: Report) -> str:
    """The last line, behind its first word."""
    seen = report.looked_at
    how = "there" if report.quick else "read"
    looked = (
        f": {show.counted(seen.batches, 'batch', 'batches')} {how}, with {show.counted(seen.records, 'record')} "
        f"({show.size(seen.bytes)}), {show.counted(seen.chunks, 'chunk')} and {show.counted(seen.slots, 'slot')}"
    )
    return f"{looked}; {report.counted()}"
