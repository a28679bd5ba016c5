"""``strandline trim``: trim a log by its retention and slots, and delete unreferenced objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Final

import typer
from rich.text import Text

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import object_log_at, open_shared
from strandline.cli.shared.common import (
    DryRun,
    QueueFormatOption,
    Url,
    confirm,
    guarded,
    span_of_time,
    stop_on_signal,
)
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics
from strandline.cli.shared.options import flag
from strandline.compat.v1.trimming import GRACE, QueueTrimResult
from strandline.errors import InvalidInput, StrandlineError
from strandline.log.object.maintain import trimmer
from strandline.log.object.maintain.trimmer import TrimResult
from strandline.log.slots.slot_metrics import SlotMetrics
from strandline.serve.log_state import log_state, measure_slots, trim_fields
from strandline.serve.monitoring import Health
from strandline.storage.clock import CLOCK

_LOGGER: Final = logging.getLogger("strandline.trim")

Line = tuple[str, str]
"""One word for the action, and a sentence."""


@guarded
def trim(
    url: Url,
    *,
    dry_run: DryRun = False,
    grace: Annotated[
        Any, span_of_time("How long trimmed objects are kept, for readers that had planned to read them.")
    ] = "10m",
    everything: Annotated[
        bool, flag("Look through all objects, not only those since the last time.", "--everything")
    ] = False,
    every: Annotated[int | None, span_of_time("Repeat it at this interval, until Ctrl-C or SIGTERM.")] = None,
    metrics: Metrics,
    format: QueueFormatOption = None,  # noqa: A002
    yes: Annotated[bool, flag("Of a queue-v1: do not ask about a short grace period.", "--yes", "-y")] = False,
) -> None:
    """Delete what the retention policy and the slots of a log allow.

    First invalidates slots beyond a limit, then unlists batches. Objects that are trimmed now are deleted by a later
    run, after the grace period; so are objects that were uploaded but never listed. Safe at any time: the next run
    finishes what a killed one left. Consumers do the same in the background.

    A queue-v1 has no slot limits: unlisted batches are deleted when they are older than the grace period, which must be
    the same for all its producers.

    Example: strandline trim s3://bucket/orders --dry-run
    """
    if every is None and metrics.metrics is not None:
        raise InvalidInput("--metrics is for a trim that is repeated: add --every TIME.")
    if every is not None and dry_run:
        raise InvalidInput("--every and --dry-run exclude each other: one trims again and again, the other never.")
    if every is not None and format is not None:
        raise InvalidInput("--every is not for a queue-v1: start this command again for each round.")
    if format is None:
        log = object_log_at(url)
        if every is not None:
            with stop_on_signal() as stop, metrics.served() as health:
                _repeat(log, health, stop, every=every, grace=grace)
            return
        with show.meter("deleting", total=None) as work, _unlogged():
            done = log.trim(grace=grace, dry_run=dry_run, everything=everything, on_progress=work.upto)
        bounds = log.bounds()
        _report(f"{log.url}  offsets {bounds.first:,} to {bounds.next:,}", trim_fields(done), lines(done, grace))
        _warn(url, done)
        return
    if everything:
        raise typer.BadParameter("--everything is for logs; a queue-v1 is always looked through as a whole.")
    queue = open_shared(url, replace(format, grace=grace))
    if grace < GRACE and not dry_run:
        usual = f"a producer with the default grace period of {show.seconds(GRACE)} may still list what is deleted now"
        confirm(f"All who write to {queue.url} must use this grace period: {usual}. Continue?", yes=yes)
    with show.meter("deleting", total=None) as work:
        swept = queue.trim(dry_run=dry_run, on_progress=work.upto)
    _report(f"{queue.url}/{queue.folder}", queue_fields(swept), queue_lines(swept, grace))


def _repeat(log: sl.log.ObjectLog, health: Health, stop: threading.Event, *, every: float, grace: int) -> None:
    """Trim, measure the slots and pause, until it is stopped. The next round repeats one that failed transiently."""
    log_to_stderr(logging.INFO)
    slots = SlotMetrics(log.url)
    fields_ = {"url": log.url, "interval": every}
    show.answer(fields_, f"{log.url} is trimmed every {show.seconds(every)}.")
    while not stop.is_set():
        try:
            done = log.trim(grace=grace)
            measure_slots(slots, log_state(log, CLOCK.now()))
        except StrandlineError as error:
            if not error.retryable:
                raise
            _LOGGER.warning("A trim of %s failed, and is repeated: %s", log.url, error)
            health.waits("its last trim failed")
        else:
            for word, sentence in lines(done, grace):
                _LOGGER.info("%s: %s %s", log.url, word, sentence)
            health.ready()
        stop.wait(max(1, every))
    slots.end()


@contextmanager
def _unlogged() -> Iterator[None]:
    """Suppress the trimmer's log messages: the command prints them at the end, with advice for a shell."""
    logger = logging.getLogger(trimmer.__name__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _report(where: str, facts: dict[str, Any], output: list[Line]) -> None:
    output = output or [("nothing", "to trim, and nothing to delete")]
    width = max(len(word) for word, _ in output)
    rows = (Text.assemble((f"  {word:>{width}}", "cyan"), f"  {sentence}") for word, sentence in output)
    show.answer(facts, Text(where, "bold"), *rows)


def _warn(url: str, done: TrimResult) -> None:
    """Print wrong clocks and invalidated slots to standard error, whatever the output: they need action."""
    for warning in [] if done.clocks is None else done.clocks.warnings():
        show.warning(warning)
    would = "would be" if done.dry_run else "was"
    for slot in done.invalidated:
        reason = "" if slot.invalid is None else f" ({slot.invalid.reason})"
        show.warning(
            f"Slot {slot.name!r} {would} invalidated{reason} at offset {slot.position:,}: it pins nothing then. "
            f"Bootstrap its consumer again, then 'strandline slots reset {url} {slot.name} --at OFFSET', or drop it."
        )


def lines(done: TrimResult, grace: int) -> list[Line]:
    """The text output for a log."""
    output = []
    if done.invalidated:
        output.append((_word(done, "invalidated", "invalidate"), show.counted(len(done.invalidated), "slot")))
    if done.expired:
        output.append((_word(done, "expired", "expire"), show.counted(len(done.expired), "hold") + " of readers"))
    if done.trimmed_records:
        what = f"{show.counted(done.trimmed_records, 'record')} ({show.size(done.trimmed_bytes)}), up to offset"
        later = f"; a run in {show.seconds(grace)} deletes their objects" if grace else ""
        output.append((_word(done, "trimmed", "trim"), f"{what} {done.floor:,}{later}"))
    if done.deleted:
        objects = f"{show.counted(done.deleted, 'object')} ({show.size(done.deleted_bytes)})"
        orphans = f", of which {done.orphans:,} ({show.size(done.orphan_bytes)}) were never listed"
        if done.orphans in (0, done.deleted):
            orphans = " that were never listed" if done.orphans else ""
        output.append((_word(done, "deleted", "delete"), objects + orphans))
    if done.waiting:
        trims = show.counted(done.waiting, "trim")
        output.append(("waiting", f"{trims}, whose objects are deleted after their grace period"))
    return output


def queue_fields(done: QueueTrimResult) -> dict[str, Any]:
    """The fields of ``--json`` for a queue."""
    return {
        "dry_run": done.dry_run,
        "deleted_objects": len(done.garbage),
        "deleted_bytes": done.size,
        "objects_waiting": done.waiting,
    }


def queue_lines(done: QueueTrimResult, grace: int) -> list[Line]:
    """The text output for a queue."""
    output = []
    if done.garbage:
        objects = show.counted(len(done.garbage), "object")
        output.append((_word(done, "deleted", "delete"), f"{objects} ({show.size(done.size)}) that are not listed"))
    if done.waiting:
        objects = show.counted(done.waiting, "object")
        output.append(("waiting", f"{objects} that are not listed, younger than {show.seconds(grace)}"))
    return output


def _word(done: TrimResult | QueueTrimResult, past: str, present: str) -> str:
    return f"would {present}" if done.dry_run else past
