"""``strandline gc``: trim a log by its retention and slots, and delete unreferenced objects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import (
    DATA,
    MANIFEST,
    Data,
    Json,
    LogFormat,
    Manifest,
    TargetFormat,
    Url,
    confirm,
    guarded,
    length_of_time,
    open_log,
    open_shared,
)
from strandline.compat.v1.gc import GRACE, Collection
from strandline.log.object.maintain import collector
from strandline.log.object.maintain.collector import TrimResult

Line = tuple[str, str]
"""What was done, in one word, and the sentence about it."""


@guarded
def gc(
    url: Url,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")] = False,
    grace: Annotated[
        int,
        typer.Option(
            metavar="TIME",
            parser=length_of_time,
            help="How long trimmed objects are kept, for readers that had planned to read them.",
        ),
    ] = "10m",  # type: ignore[assignment]  # what the parser is given
    everything: Annotated[
        bool, typer.Option("--everything", help="Look through all objects, not only those since the last time.")
    ] = False,
    format: LogFormat = TargetFormat.LOG,  # noqa: A002
    manifest: Manifest = MANIFEST,
    data: Data = DATA,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Of a queue-v1: do not ask about a short grace period.")
    ] = False,
    json: Json = False,
) -> None:
    """Collect garbage: invalidate slots that break a limit, trim as retention and slots allow, delete what is unneeded.

    What is trimmed now is deleted by a later run, when the grace period is over; so is what was uploaded and never
    listed. Safe at any time, and as often as you like: killed, it goes on at the next run. Consumers do the same in the
    background.

    A queue-v1 has no slots to judge: what is not listed goes when it is older than the grace period, which has to be
    the same for all who write to the queue.
    """
    if format is TargetFormat.LOG:
        log = open_log(url)
        with show.meter("deleting", total=None, quiet=json) as advance, _unlogged():
            told = show.so_far(advance)
            done = log.trim(grace=grace, dry_run=dry_run, everything=everything, on_progress=told)
        bounds = log.bounds()
        _report(f"{log.url}  offsets {bounds.first:,} to {bounds.next:,}", fields(done), lines(done, grace), json)
        _shout(url, done)
        return
    if everything:
        raise typer.BadParameter("--everything is for logs; a queue-v1 is always looked through as a whole.")
    queue = open_shared(url, manifest=manifest, data=data, grace=grace)
    if grace < GRACE and not dry_run:
        usual = f"who uploads with the usual grace period of {show.seconds(GRACE)} may still list what is deleted now"
        confirm(f"All who write to {queue.url} must know of this grace period: {usual}. Go on?", yes=yes)
    with show.meter("deleting", total=None, quiet=json) as advance:
        swept = queue.trim(dry_run=dry_run, on_progress=show.so_far(advance))
    _report(f"{queue.url}/{queue.folder}", queue_fields(swept), queue_lines(swept, grace), json)


@contextmanager
def _unlogged() -> Iterator[None]:
    """What the collector would log is said at the end, with what to do about it in a shell."""
    logger = logging.getLogger(collector.__name__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _report(where: str, facts: dict[str, Any], said: list[Line], as_json: bool) -> None:
    said = said or [("nothing", "to trim, and nothing to delete")]
    width = max(len(word) for word, _ in said)
    told = (Text.assemble((f"  {word:>{width}}", "cyan"), f"  {sentence}") for word, sentence in said)
    show.answer(facts, Text(where, "bold"), *told, as_json=as_json)


def _shout(url: str, done: TrimResult) -> None:
    """Wrong clocks and invalidated slots, on standard error whatever the output is: somebody has to act."""
    for said in [] if done.clocks is None else done.clocks.warnings():
        show.warning(said)
    would = "would be" if done.dry_run else "was"
    for slot in done.invalidated:
        reason = "" if slot.invalid is None else f" ({slot.invalid.reason})"
        show.warning(
            f"Slot {slot.name!r} {would} invalidated{reason} at offset {slot.position:,}: it pins nothing then. "
            f"Bootstrap its consumer again, then 'strandline slots reset {url} {slot.name} --at OFFSET', or drop it."
        )


def fields(done: TrimResult) -> dict[str, Any]:
    """What ``--json`` prints for a log."""
    return {
        "dry_run": done.dry_run,
        "floor": done.floor,
        "trimmed_records": done.trimmed_records,
        "trimmed_bytes": done.trimmed_bytes,
        "invalidated": [
            {
                "slot": slot.name,
                "position": slot.position,
                "reason": None if slot.invalid is None else str(slot.invalid.reason),
            }
            for slot in done.invalidated
        ],
        "expired_holds": done.expired,
        "deleted_objects": done.deleted,
        "deleted_bytes": done.deleted_bytes,
        "orphans": done.orphans,
        "orphan_bytes": done.orphan_bytes,
        "trims_waiting": done.waiting,
        "clock_ahead_of_store_seconds": 0.0 if done.clocks is None else done.clocks.skew,
        "listed_ahead_seconds": 0.0 if done.clocks is None else done.clocks.ahead,
    }


def lines(done: TrimResult, grace: int) -> list[Line]:
    """What people are told of a collection of a log."""
    said = []
    if done.invalidated:
        said.append((_word(done, "invalidated", "invalidate"), show.counted(len(done.invalidated), "slot")))
    if done.expired:
        said.append((_word(done, "expired", "expire"), show.counted(len(done.expired), "hold") + " of readers"))
    if done.trimmed_records:
        what = f"{show.counted(done.trimmed_records, 'record')} ({show.size(done.trimmed_bytes)}), up to offset"
        later = f"; a run in {show.seconds(grace)} deletes their objects" if grace else ""
        said.append((_word(done, "trimmed", "trim"), f"{what} {done.floor:,}{later}"))
    if done.deleted:
        objects = f"{show.counted(done.deleted, 'object')} ({show.size(done.deleted_bytes)})"
        orphans = f", of which {done.orphans:,} ({show.size(done.orphan_bytes)}) were never listed"
        if done.orphans in (0, done.deleted):
            orphans = " that nothing ever listed" if done.orphans else ""
        said.append((_word(done, "deleted", "delete"), objects + orphans))
    if done.waiting:
        trims = show.counted(done.waiting, "trim")
        said.append(("waiting", f"{trims}, whose objects go when their grace period is over"))
    return said


def queue_fields(done: Collection) -> dict[str, Any]:
    """What ``--json`` prints for a queue."""
    return {
        "dry_run": done.dry_run,
        "deleted_objects": len(done.garbage),
        "deleted_bytes": done.size,
        "objects_waiting": done.waiting,
    }


def queue_lines(done: Collection, grace: int) -> list[Line]:
    """What people are told of a collection of a queue."""
    said = []
    if done.garbage:
        objects = show.counted(len(done.garbage), "object")
        said.append((_word(done, "deleted", "delete"), f"{objects} ({show.size(done.size)}) that nothing lists"))
    if done.waiting:
        objects = show.counted(done.waiting, "object")
        said.append(("waiting", f"{objects} that nothing lists, younger than {show.seconds(grace)}"))
    return said


def _word(done: TrimResult | Collection, past: str, present: str) -> str:
    return f"would {present}" if done.dry_run else past
