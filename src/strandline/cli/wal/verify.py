"""``strandline wal verify``: is every byte as it should be?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.wal.shared import Folder, data_bytes, need_wal
from strandline.log.findings import Severity
from strandline.log.wal.recover.verify import Verification
from strandline.log.wal.recover.verify import verify as look
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK

_SHOWN: Final = 50
_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.NOTE: "cyan"}


@guarded
def verify(
    folder: Folder,
    *,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Verify a log: each frame's checksums and records, each offset once and in order, terms, indexes, slots, the mark.

    Reads every byte, changes nothing and takes no lock; the log may be used meanwhile. Findings are *damage* (something
    acknowledged is lost or wrong) and *notes* (opening puts it right). Ends with status 1 if there is damage.
    """
    need_wal(folder)
    with show.meter("reading bytes", total=data_bytes(folder), quiet=json) as advance:
        found = look(folder, disk=DISK, clock=CLOCK, told=advance)
    if json:
        show.document(fields(found))
    else:
        print_findings(found)
    if not found.is_clean:
        raise typer.Exit(1)


def fields(found: Verification) -> dict[str, Any]:
    """What ``--json`` prints."""
    counts = Counter(finding.severity for finding in found.findings)
    return {
        "folder": found.folder,
        "log_id": None if found.log_id is None else str(found.log_id),
        "clean": found.is_clean,
        "start": found.bounds.first,
        "next": found.bounds.next,
        **{str(severity): counts[severity] for severity in Severity},
        "looked_at": asdict(found.looked_at),
        "findings": [asdict(finding) for finding in found.findings],
    }


def print_findings(found: Verification) -> None:
    """The findings, worst first, and one line that sums them up."""
    out = show.out()
    out.print(Text(found.folder, "bold"))
    for severity in Severity:
        of = [finding for finding in found.findings if finding.severity is severity]
        for finding in of[:_SHOWN]:
            out.print(Text.assemble((f"{severity:>8}", _STYLES[severity]), f"  {finding.message}"), soft_wrap=True)
        if len(of) > _SHOWN:
            out.print(Text.assemble((f"{severity:>8}", _STYLES[severity]), f"  … and {len(of) - _SHOWN:,} more"))
    clean = ("clean", "bold green") if found.is_clean else ("DAMAGED", "bold red")
    out.print(Text.assemble(clean, summary(found)), soft_wrap=True)


def summary(found: Verification) -> str:
    """The last line, behind its first word."""
    seen, damage = found.looked_at, len(found.damage)
    notes = len(found.findings) - damage
    return (
        f": {show.counted(seen.files, 'file')} read, with {show.counted(seen.records, 'record')} in "
        f"{show.counted(seen.frames, 'frame')} ({show.size(seen.bytes)}), and {show.counted(seen.slots, 'slot')}; "
        f"{f'{damage:,} damaged' if damage else 'no damage'}, {show.counted(notes, 'note') if notes else 'no notes'}"
    )
