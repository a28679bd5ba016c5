"""``strandline wal inspect``: files, slots, mark and frames of a write-ahead log or a spool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.targets import look, need, spool_at
from strandline.cli.text import readable
from strandline.compat.spool.inspect import SpoolFile, SpoolFrame, inspect_spool
from strandline.log.folders import FolderKind
from strandline.log.wal.inspect import FrameRow, WalFolder, frames, inspect_wal

_STATES: Final = {
    "closed": "closed",
    "open": "open for writing by {holder}",
    "died": "not closed: {holder} died, and opening it again repairs what is left",
    "crashed": "not closed when the machine stopped ({holder}): opening it repairs what is left",
    "unknown": "its mark cannot be read: opening it makes it again",
}


@guarded
def inspect(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="The log's folder, or an older spool NAME.logical.wal.",
            show_default=False,
        ),
    ],
    *,
    list_frames: Annotated[bool, typer.Option("--frames", help="List every frame, and check it.")] = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Say what is on the disk: identity, bounds, files, slots, the mark, and who has the log open.

    Changes nothing and takes no lock; the log may be open, or damaged. With **--json** and **--frames** the first line
    is the log, and each further one a frame.
    """
    there = look(folder)
    if (spool := spool_at(there)) is not None:
        _inspect_spool(spool, list_frames=list_frames, json=json)
        return
    need(there, FolderKind.WAL)
    found = inspect_wal(folder)
    if json:
        show.document(asdict(found))
        if list_frames:
            for row in frames(found):
                show.document(asdict(row))
        return
    out = show.out()
    _print(out, found)
    if list_frames:
        _print_frames(out, frames(found))


# --- a folder ----------------------------------------------------------------------------------------------------


def _print(out: Console, found: WalFolder) -> None:
    out.print(Text.assemble((found.folder, "bold"), f"  log {found.log_id or 'unknown'}"))
    out.print(f"  state    {_STATES[found.state].format(holder=readable((found.holder or 'nobody').encode()))}")
    out.print(f"  holds    {_bounds(found)}")
    if found.mark is not None:
        out.print(
            f"  mark     everything below offset {found.mark['next']:,} is durable; the log begins at "
            f"{found.mark['start']:,}"
        )
    out.print()
    out.print(_file_table(found))
    if found.slots:
        out.print()
        out.print(_slot_table(found))
    for piece in found.torn:
        out.print(f"  {piece.file} holds {show.counted(piece.size, 'byte')} that were once cut.", soft_wrap=True)
    for problem in found.problems:
        out.print(Text.assemble(("problem", "bold red"), f"  {problem}"), soft_wrap=True)


def _bounds(found: WalFolder) -> str:
    if found.start is None or found.next is None:
        return "how far it reaches is not known"
    how = "as published" if found.published else "as found in the last file"
    term = "" if found.term is None else f", in term {found.term}"
    if found.start == found.next:
        return f"no records; the next one gets offset {found.next:,}{term}, {how}"
    return (
        f"offsets {found.start:,} to {found.next - 1:,}, "
        f"{show.counted(found.next - found.start, 'record')}{term}, {how}"
    )


def _file_table(found: WalFolder) -> Table:
    table = _table("file", "first", "size", "records", "checkpoints")
    for row in found.files:
        table.add_row(row.file, f"{row.first:,}", show.size(row.size), _number(row.records), _number(row.checkpoints))
    return table


def _slot_table(found: WalFolder) -> Table:
    table = _table("slot", "position", "epoch", "holder", "")
    for row in found.slots:
        invalid = "" if row.invalid is None else f"invalid: {row.invalid}"
        holder = readable(None if row.holder is None else row.holder.encode())
        table.add_row(readable(row.slot.encode()), f"{row.position:,}", str(row.epoch), holder, invalid)
    return table


def _print_frames(out: Console, rows: Iterable[FrameRow]) -> None:
    """One line for each, as it is found: there may be millions."""
    last = ""
    for row in rows:
        if row.file != last:
            last = row.file
            out.print()
            out.print(Text(last, "bold"))
        out.print(_frame_line(row), soft_wrap=True)


def _frame_line(row: FrameRow) -> Text:
    place = f"  byte {row.byte:>10,} {show.size(row.size):>9}"
    if row.first is None or row.next is None:
        return Text.assemble(place, "  ", ("no frame", "bold red"), f": {row.problem}")
    what = "begins" if row.lead else show.counted(row.next - row.first, "record")
    span = f"{row.first:,}" if row.next - row.first <= 1 else f"{row.first:,}-{row.next - 1:,}"
    text = (
        f"{place}  offset {span:<15} {what:<14} term {row.term}  {_time(row.timestamp)}  durable below {row.durable:,}"
    )
    if row.writer is not None:
        text += f"  writer {row.writer} number {row.number:,}"
    return Text.assemble(text, *([("  " + row.problem, "bold red")] if row.problem else []))


# --- a spool -----------------------------------------------------------------------------------------------------


def _inspect_spool(path: str, *, list_frames: bool, json: bool) -> None:
    rows: list[SpoolFrame] = []
    found = inspect_spool(path, rows.append if list_frames else None)
    if json:
        show.document(asdict(found))
        for row in rows:
            show.document(asdict(row))
        return
    out = show.out()
    _print_spool(out, found)
    for row in rows:
        term = "-" if row.term is None else row.term
        line = f"  byte {row.byte:>10,} {show.size(row.size):>9}  lsn {row.lsn:<10,} version {row.version}  term {term}"
        out.print(f"{line}  {_time(row.timestamp)}", soft_wrap=True)


def _print_spool(out: Console, found: SpoolFile) -> None:
    out.print(Text.assemble((found.spool, "bold"), "  a spool of an older version"))
    count = sum(found.versions.values())
    by_version = ", ".join(f"{number:,} of version {version}" for version, number in found.versions.items())
    lsns = "" if found.first_lsn is None else f", lsns {found.first_lsn:,} to {found.last_lsn:,}"
    out.print(f"  frames   {count:,}" + (f" ({by_version}){lsns}" if count else ""))
    rest = found.size - found.valid_bytes
    if rest:
        out.print(
            f"  valid    up to byte {found.valid_bytes:,} of {found.size:,}: {found.why} ({found.ending}); the last "
            f"{show.counted(rest, 'byte')} count for nothing",
            soft_wrap=True,
        )
    else:
        out.print(f"  valid    all of its {found.size:,} bytes")
    out.print(f"  slots    {'none beside it' if found.slots is None else show.counted(found.slots, 'slot')}")
    for problem in found.problems:
        out.print(Text.assemble(("problem", "bold red"), f"  {problem}"), soft_wrap=True)


# --- how things look ---------------------------------------------------------------------------------------------


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="")
    for name in names:
        table.add_column(name, justify="left" if name in {"file", "slot", "holder", ""} else "right", no_wrap=True)
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _time(milliseconds: int | None) -> str:
    try:
        return datetime.fromtimestamp((milliseconds or 0) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
