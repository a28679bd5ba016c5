"""``strandline verify``: verify an object log."""

from __future__ import annotations

from typing import Annotated

import typer

from strandline.cli import output as show
from strandline.cli.common import Json, Url, guarded, open_log
from strandline.cli.findings import finish
from strandline.errors import CorruptData
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.maintain.verify import ObjectLogVerifier


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
    (something takes up room that nobody needs) and *notes*. Ends with status 1 if there is damage.
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
        total = None  # the findings say so
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
