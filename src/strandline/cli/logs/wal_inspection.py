"""The output of ``strandline wal inspect``: a write-ahead log, its frames, and a spool of an older version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final, TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.cli.shared.text import moment, readable
from strandline.compat.spool.format import LegacyFrame, SpoolFile, inspect_spool
from strandline.log.wal.inspect import FrameRow, WalFolder, frames, inspect_wal

T = TypeVar("T")

_STATES: Final = {
    "closed": "closed",
    "open": "open for writing by {holder}",
    "died": "not closed: {holder} died, and opening it again repairs it",
    "crashed": "not closed when the machine stopped ({holder}): opening it repairs it",
    "unknown": "its mark cannot be read: opening it rebuilds it",
}


# --- a folder ----------------------------------------------------------------------------------------------------


def show_log(folder: str, *, list_frames: bool) -> None:
    """Inspect a log, and print it, with its frames if ``list_frames``."""
    found = inspect_wal(folder)
    show.answer(asdict(found), *_folder_lines(found))
    if list_frames:
        _each(frames(found), asdict, _frame_lines)


def _each(
    rows: Iterable[T], fields: Callable[[T], dict[str, Any]], lines: Callable[[Iterable[T]], Iterable[Text]]
) -> None:
    """Print one line for each frame as soon as it is read: there may be millions."""
    out = show.out()
    if show.for_programs():
        for row in rows:
            show.document(fields(row))
        return
    for text in lines(rows):
        out.print(text, soft_wrap=True)


def _folder_lines(found: WalFolder) -> Iterator[RenderableType]:
    """Identity, state, bounds, files, slots and problems."""
    yield Text.assemble((found.folder, "bold"), f"  log {found.log_id or 'unknown'}")
    yield f"  state    {_STATES[found.state].format(holder=readable((found.holder or 'nobody').encode()))}"
    yield f"  holds    {_bounds(found)}"
    if found.values is not None:
        yield f"  values   {readable(found.values.encode())}"
    if found.mark is not None:
        durable, start = found.mark["next"], found.mark["start"]
        yield f"  mark     everything below offset {durable:,} is durable; the log begins at {start:,}"
    yield ""
    yield _file_table(found)
    if found.slots:
        yield ""
        yield _slot_table(found)
    for piece in found.torn:
        yield f"  {piece['file']} holds {show.counted(piece['size'], 'byte')} that a repair cut off."
    yield from _problems(found.problems)


def _problems(texts: Iterable[str]) -> Iterator[Text]:
    return (Text.assemble(("problem", "bold red"), f"  {text}") for text in texts)


def _bounds(found: WalFolder) -> str:
    if found.start is None or found.next is None:
        return "its end is not known"
    how = "as published" if found.published else "as found in the last file"
    term = "" if found.term is None else f", in term {found.term}"
    if found.start == found.next:
        return f"no records; the next one gets offset {found.next:,}{term}, {how}"
    return f"{show.offsets(found.start, found.next)}{term}, {how}"


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
        invalid = "" if row["invalid"] is None else f"invalid: {row['invalid']}"
        holder = readable(None if row["holder"] is None else row["holder"].encode())
        table.add_row(readable(row["slot"].encode()), f"{row['position']:,}", str(row["epoch"]), holder, invalid)
    return table


def _frame_lines(rows: Iterable[FrameRow]) -> Iterator[Text]:
    last = ""
    for row in rows:
        if row.file != last:
            last = row.file
            yield Text.assemble("\n", (last, "bold"))
        yield _frame_line(row)


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
    show.answer(asdict(found), *_spool_lines(found))
    _each(rows, dict, _spool_frame_lines)


def _spool_frame_lines(rows: Iterable[dict[str, Any]]) -> Iterator[Text]:
    for row in rows:
        term = "-" if row["term"] is None else row["term"]
        place = f"  byte {row['byte']:>10,} {show.size(row['size']):>9}"
        yield Text(f"{place}  lsn {row['lsn']:<10,} version {row['version']}  term {term}  {_time(row['timestamp'])}")


def _fields(frame: LegacyFrame) -> dict[str, Any]:
    version, term, lsn, timestamp, _, start, end = frame
    return {
        "byte": start, "size": end - start, "version": version, "lsn": lsn, "term": term, "timestamp": timestamp,
    }  # fmt: skip


def _spool_lines(found: SpoolFile) -> Iterator[RenderableType]:
    yield Text.assemble((found.spool, "bold"), "  a spool of an older version")
    count = sum(found.versions.values())
    by_version = ", ".join(f"{number:,} of version {version}" for version, number in found.versions.items())
    lsns = "" if found.first_lsn is None else f", lsns {found.first_lsn:,} to {found.last_lsn:,}"
    yield f"  frames   {count:,}" + (f" ({by_version}){lsns}" if count else "")
    rest = found.size - found.valid_bytes
    valid = f"all of its {found.size:,} bytes"
    if rest:
        valid = f"up to byte {found.valid_bytes:,} of {found.size:,}: {found.why} ({found.ending}); the last "
        valid += f"{show.counted(rest, 'byte')} are ignored"
    yield f"  valid    {valid}"
    yield f"  slots    {'none beside it' if found.slots is None else show.counted(found.slots, 'slot')}"
    yield from _problems(found.problems)


def _time(milliseconds: int | None) -> str:
    found = moment((milliseconds or 0) * 1000)
    return f"{milliseconds} ms" if found is None else found[:-3]
