"""The output of ``strandline wal inspect``: a write-ahead log, its frames, and a spool of an older version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.cli.shared.text import moment, readable
from strandline.compat.spool.format import LegacyFrame, SpoolFile, inspect_spool
from strandline.log.wal.inspect import FrameRow, WalFolder

_STATES: Final = {
    "closed": "closed",
    "open": "open for writing by {holder}",
    "died": "not closed: {holder} died, and opening it again repairs it",
    "crashed": "not closed when the machine stopped ({holder}): opening it repairs it",
    "unknown": "its mark cannot be read: opening it rebuilds it",
}


# --- a folder ----------------------------------------------------------------------------------------------------


def print_folder(out: Console, found: WalFolder) -> None:
    """Print a log: identity, state, bounds, files, slots and problems."""
    out.print(Text.assemble((found.folder, "bold"), f"  log {found.log_id or 'unknown'}"))
    out.print(f"  state    {_STATES[found.state].format(holder=readable((found.holder or 'nobody').encode()))}")
    out.print(f"  holds    {_bounds(found)}")
    if found.values is not None:
        out.print(f"  values   {readable(found.values.encode())}")
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
        out.print(f"  {piece.file} holds {show.counted(piece.size, 'byte')} that a repair cut off.", soft_wrap=True)
    for problem in found.problems:
        show.say(Text.assemble(("problem", "bold red"), f"  {problem}"))


def _bounds(found: WalFolder) -> str:
    if found.start is None or found.next is None:
        return "its end is not known"
    how = "as published" if found.published else "as found in the last file"
    term = "" if found.term is None else f", in term {found.term}"
    if found.start == found.next:
        return f"no records; the next one gets offset {found.next:,}{term}, {how}"
    return (
        f"offsets {found.start:,} to {found.next - 1:,}, "
        f"{show.counted(found.next - found.start, 'record')}{term}, {how}"
    )


def _file_table(found: WalFolder) -> Table:
    table = show.table("file", ">first", ">size", ">records", ">checkpoints")
    for row in found.files:
        table.add_row(
            row.file, f"{row.first:,}", show.size(row.size), show.number(row.records), show.number(row.checkpoints)
        )
    return table


def _slot_table(found: WalFolder) -> Table:
    table = show.table("slot", ">position", ">epoch", "holder", "")
    for row in found.slots:
        invalid = "" if row.invalid is None else f"invalid: {row.invalid}"
        holder = readable(None if row.holder is None else row.holder.encode())
        table.add_row(readable(row.slot.encode()), f"{row.position:,}", str(row.epoch), holder, invalid)
    return table


def print_frames(out: Console, rows: Iterable[FrameRow]) -> None:
    """Print one line for each frame as soon as it is read: there may be millions."""
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


def show_spool(path: str, *, list_frames: bool) -> None:
    """Inspect a spool of an older version, and print it, with its frames if ``list_frames``."""
    rows: list[dict[str, Any]] = []
    found = inspect_spool(path, (lambda frame: rows.append(_fields(frame))) if list_frames else None)
    if show.for_programs():
        show.document(asdict(found))
        for row in rows:
            show.document(row)
        return
    out = show.out()
    _print_spool(out, found)
    for row in rows:
        term = "-" if row["term"] is None else row["term"]
        place = f"  byte {row['byte']:>10,} {show.size(row['size']):>9}"
        line = f"{place}  lsn {row['lsn']:<10,} version {row['version']}  term {term}  {_time(row['timestamp'])}"
        out.print(line, soft_wrap=True)


def _fields(frame: LegacyFrame) -> dict[str, Any]:
    version, term, lsn, timestamp, _, start, end = frame
    return {
        "byte": start, "size": end - start, "version": version, "lsn": lsn, "term": term, "timestamp": timestamp,
    }  # fmt: skip


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
            f"{show.counted(rest, 'byte')} are ignored",
            soft_wrap=True,
        )
    else:
        out.print(f"  valid    all of its {found.size:,} bytes")
    out.print(f"  slots    {'none beside it' if found.slots is None else show.counted(found.slots, 'slot')}")
    for problem in found.problems:
        show.say(Text.assemble(("problem", "bold red"), f"  {problem}"))


def _time(milliseconds: int | None) -> str:
    found = moment((milliseconds or 0) * 1000)
    return f"{milliseconds} ms" if found is None else found[:-3]
