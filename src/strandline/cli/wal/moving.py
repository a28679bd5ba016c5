"""``strandline wal export`` and ``migrate``: to and from spools of older versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.targets import look, need, spool_at
from strandline.cli.wal.shared import Folder, need_wal
from strandline.compat.spool.export import export_spool
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.compat.spool.migrate import SPOOL, migrate_spool
from strandline.compat.spool.renumber import OLD_LSN, Renumbering
from strandline.errors import AlreadyExists, InvalidInput
from strandline.log.folders import Contents, FolderKind
from strandline.log.wal.read.reader import WalReader
from strandline.storage.clock import CHANCE, CLOCK
from strandline.storage.disk import DISK

_SHOWN: Final = 50


@guarded
def export(
    folder: Folder,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The spool to write: NAME.logical.wal.", show_default=False)
    ],
    *,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Write everything that is retained as a spool for older programs, with the slots beside it.

    Changes nothing in the log, which may be open. The spool appears only when it is whole, and replaces nothing.
    """
    need_wal(folder)
    log = WalReader(folder)
    with show.meter("exporting", total=log.bounds().count, quiet=json) as advance:
        done = export_spool(log, target, told=show.so_far(advance))
    if json:
        show.document(asdict(done))
        return
    show.out().print(
        f"{done.path} holds {show.counted(done.records, 'record')} (lsns {done.first:,} to {done.last:,}, "
        f"{show.size(done.size)}), and {done.slots_path} {show.counted(done.slots, 'slot')}.",
        soft_wrap=True,
        markup=False,
    )


@guarded
def migrate(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="The spool NAME.logical.wal, or NAME, the folder that is made.", show_default=False
        ),
    ],
    *,
    renumber: Annotated[
        bool,
        typer.Option(
            "--renumber",
            help="Give records whose lsns leave gaps or go back new ones; the header spool-lsn keeps the old.",
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Move a spool of an older version, with its slots, into a folder beside it. The spool stays as it is."""
    there = look(path)
    spool = spool_at(there)
    if spool is None or not spool.endswith(SPOOL):
        need(there, FolderKind.SPOOL, nothing=f"a spool is called NAME{SPOOL}; check the path.")
        raise InvalidInput(f"{spool or path} is not called NAME{SPOOL}: name the spool itself, by a name like that.")
    folder = spool.removesuffix(SPOOL)
    refuse_taken(look(folder))
    done = migrate_spool(folder, disk=DISK, clock=CLOCK, chance=CHANCE, renumber=renumber)
    with WriteAheadLog.open(folder, create=False) as wal:
        oldest, current, slots = wal.oldest, wal.current, len(wal.log.slots())
    size = DISK.size(folder + SPOOL)
    if json:
        fields = {"folder": folder, "oldest": oldest, "current": current, "slots": slots, "spool_bytes": size}
        show.document({**fields, **_renumbered(done)})
        return
    show.out().print(
        f"{folder} holds {show.counted(current - oldest + 1, 'record')} (lsns {oldest:,} to {current:,}) and "
        f"{show.counted(slots, 'slot')}; {folder}{SPOOL} ({show.size(size)}) is as it was.",
        soft_wrap=True,
        markup=False,
    )
    for line in () if done is None else _gap_lines(done):
        show.line(line)


def _renumbered(done: Renumbering | None) -> dict[str, Any]:
    """What ``--json`` prints of new numbers."""
    gaps = () if done is None else done.gaps
    return {
        "renumbered": done is not None,
        "missing": 0 if done is None else done.missing,
        "gaps": [{"index": gap.index, "after": gap.after, "found": gap.found, "missing": gap.missing} for gap in gaps],
    }


def _gap_lines(done: Renumbering) -> Iterator[str]:
    """What was renumbered, and each gap."""
    gaps, lsns = show.counted(len(done.gaps), "gap"), show.counted(done.missing, "lsn")
    yield f"Its records were renumbered, for {gaps} with {lsns} missing; the header {OLD_LSN} keeps the old ones."
    for gap in done.gaps[:_SHOWN]:
        yield f"  before record {gap.index:,}: {'missing' if gap.missing else 'goes back,'} {gap}"
    if len(done.gaps) > _SHOWN:
        yield f"  … and {len(done.gaps) - _SHOWN:,} more; --json tells all"


def refuse_taken(there: Contents) -> None:
    """Refuse to migrate to where something is already."""
    if not there.kinds <= {FolderKind.SPOOL, FolderKind.EMPTY, FolderKind.ABSENT}:
        raise AlreadyExists(f"{there.path} is there already, and is {there}: nothing was moved.")
