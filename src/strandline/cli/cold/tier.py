"""``strandline tier``: give a log a cold tier, look at it, and copy closed ranges, once or as a service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from threading import Event
from typing import Annotated, Any, Final

import typer

from strandline.cli.cold.status import status
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import tierable_log
from strandline.cli.shared.common import (
    INTERRUPTED,
    Place,
    Quiet,
    Workers,
    Yes,
    confirm,
    guarded,
    retention_policy,
    size,
    span_of_time,
    stop_on_signal,
)
from strandline.cli.shared.groups import group
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics
from strandline.cli.shared.options import flag, option
from strandline.cli.shared.pools import is_on_spark, task_pool
from strandline.model.retention import parse_retention
from strandline.model.segments import SegmentMetadata
from strandline.tier.attachment import PARTITIONS
from strandline.tier.copy.rounds import Compacted, Round, TieringStep
from strandline.tier.opening import attach as give
from strandline.tier.opening import cold_cell, cold_tier, log_address, tiering
from strandline.tier.verify import HotLog, Untiered, untiered

tier = group("Give a log a cold tier, and copy what is old into it.")

FENCED: Final = 3
"""The status if another tierer has taken over."""
_guarded = partial(guarded, fenced=FENCED)

_LOGGER = logging.getLogger("strandline.tier")

_TARGET: Final = "256MiB"
Target = Annotated[Any, size("About how large a segment is, at most 1GiB.")]


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """The options of a tierer: which segments it makes, and how long they are kept."""

    target: Target = _TARGET
    linger: Annotated[Any, span_of_time("How long records wait at most for a segment to be filled.")] = "1h"
    retention: Annotated[
        str,
        option(
            "POLICY",
            "Retention of the cold tier, oldest first and only segments that no slot needs: forever, consumed, "
            "age:90d or bytes:10TiB.",
            parser=retention_policy,
        ),
    ] = "forever"
    snapshots: Annotated[
        str | None,
        option("FOLDER", "A folder of this tierer's own, so that the next start need not read all events again."),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The same as arguments of :func:`tiering`."""
        return {
            "target": self.target,
            "linger": self.linger,
            "retention": parse_retention(self.retention),
            "snapshot_dir": self.snapshots,
        }


# --- attaching -----------------------------------------------------------------------------------------------


@tier.command()
@guarded
def attach(
    log: Place,
    *,
    store: Annotated[str | None, option("URL", "Where segments are put; by default 'cold' beside the log.")] = None,
    events: Annotated[
        str | None,
        option(
            "URL", "Where their events are: an address, by default 'events' in that store, or kafka://host:port/topic."
        ),
    ] = None,
    partitions: Annotated[
        int, option("N", "How many partitions the events have; logs may share them.", min=1)
    ] = PARTITIONS,
) -> None:
    """Give a log a cold tier: durably record the addresses of its segments and events. Nothing is copied yet.

    Readers that open the log from now on read both tiers as one. Repeating it changes nothing; a log has one cold tier,
    and another one is refused.

    Example: strandline tier attach s3://bucket/orders --store s3://archive/orders
    """
    opened = tierable_log(log)
    known = cold_cell(opened).read()
    cold = give(opened, store, events, partitions=partitions)
    url = log_address(opened)
    show.answer(
        {"url": url, **asdict(cold), "log_id": str(cold.log_id), "attached": known is None},
        f"{url} {'has its cold tier' if known is None else 'had its cold tier already'}.",
        f"  segments  {cold.store}",
        f"  events    {cold.events}  {show.counted(cold.partitions, 'partition')}",
    )


# --- once ------------------------------------------------------------------------------------------------------


@tier.command()
@_guarded
def run(
    log: Place,
    *,
    everything: Annotated[bool, flag("Also copy what fills no segment yet and has not waited long.", "--all")] = False,
    segments: SegmentOptions,
    workers: Workers = None,
) -> None:
    """Copy full segments to the cold tier, once; clean up after crashes; delete expired segments.

    The hot tier keeps its records until its own retention deletes them ('strandline trim'), and never deletes a record
    that is in no segment yet. Ctrl-C ends it before the next segment, without a partial copy. A tierer that serves the
    log is fenced by this, and ends; so does this, with status 3, if another one takes over meanwhile. For a large
    backlog: --workers copies several segments at once, each in memory; on a cluster 'strandline spark tier'.

    Example: strandline tier run s3://bucket/orders --all
    """
    with _until_stopped(log) as (opened, stop, on_progress):
        pool = task_pool(workers) if workers is not None or is_on_spark() else None
        began = time.monotonic()
        with tiering(opened, on_progress=on_progress, pool=pool, **segments.settings) as tierer:
            done = tierer.run_once(everything=everything, stop=stop)
        left, seconds = untiered(opened), time.monotonic() - began
        fields = {
            **_of(opened),
            **{name: _each(getattr(done, name)) for name in ("copied", "removed", "expired", "retired")},
            "swept": list(done.swept),
            "records_left": left.records,
            "bytes_left": left.size,
            "seconds": round(seconds, 3),
            "stopped": stop.is_set(),
        }
        show.answer(fields, _summary(done, left, seconds, stopped=stop.is_set()))


@contextmanager
def _until_stopped(log: str) -> Iterator[tuple[HotLog, Event, Callable[[TieringStep], None]]]:
    """The log, opened for changes, an event that Ctrl-C sets, and what prints a step; ends with the status of that."""

    def on_progress(step: TieringStep) -> None:
        if not show.for_programs():
            show.line(line(step))

    with tierable_log(log, writes=True) as opened, stop_on_signal() as stop:
        yield opened, stop, on_progress
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)


def _of(log: HotLog) -> dict[str, Any]:
    """The addresses of the log and its segments."""
    return {"url": log_address(log), "store": cold_tier(log).store}


def line(step: TieringStep) -> str:
    """One step of a round.

    >>> line(TieringStep("copied", "x", 0, 9_999, 1_200_000, 0.5))
    ' copied  offsets 0 to 9,999  1.2 MB at 2.4 MB/s'
    """
    if step.what == "swept":
        return f"  swept  {step.path}, which no event knew"
    text = f"{step.what:>7}  offsets {step.first:,} to {step.last:,}  {show.size(step.size)}"
    return text + (f" at {show.size(step.size / step.seconds)}/s" if step.seconds > 0 else "")


def _summary(done: Round, left: Untiered, seconds: float, *, stopped: bool) -> str:
    parts = [("stopped: " if stopped else "") + f"{_counted(done.copied)} copied in {show.seconds(seconds)}"]
    if done.expired:
        parts.append(f"{_counted(done.expired)} expired")
    if done.retired:
        parts.append(f"{show.counted(len(done.retired), 'segment')} of another history than the log's cut or removed")
    if done.removed:
        parts.append(f"{show.counted(len(done.removed), 'segment')} left over and removed")
    if done.swept:
        parts.append(f"{show.counted(len(done.swept), 'object')} swept")
    if left.records:
        parts.append(f"{show.counted(left.records, 'record')} ({show.size(left.size)}) in no segment yet")
    return "; ".join(parts)


def _counted(segments: Iterable[SegmentMetadata]) -> str:
    held = list(segments)
    records = show.counted(sum(segment.end - segment.start + 1 for segment in held), "record")
    size = show.size(sum(segment.size for segment in held))
    return f"{show.counted(len(held), 'segment')} ({records}, {size})" if held else "nothing"


def _each(segments: Iterable[SegmentMetadata]) -> list[dict[str, Any]]:
    return [
        {"id": str(segment.segment.id), "start": segment.start, "end": segment.end, "size": segment.size}
        for segment in segments
    ]


# --- compaction ------------------------------------------------------------------------------------------------


@tier.command()
@_guarded
def compact(
    log: Place,
    *,
    purge: Annotated[bool, flag("Also erase, for good, the values of keys that were purged later.", "--purge")] = False,
    everything: Annotated[
        bool, flag("Merge any two small segments, not only many or those that fill one.", "--all")
    ] = False,
    target: Target = _TARGET,
    workers: Workers = None,
) -> None:
    """Merge small segments of the cold tier, and erase personal data that was purged.

    With --purge, a record with op 'purge' erases the values and headers of all earlier records with its key, in all
    segments that the log itself no longer has (see 'strandline trim'). Tables, exports and snapshots keep what they
    have: rebuild them. Readers continue meanwhile: the objects of replaced segments are deleted by 'tier run' or 'tier
    serve' a day later, those with erased values at once. Killed at any moment it loses nothing, and the next run
    continues. A tierer that serves the log is fenced by this, and ends.

    Example: strandline tier compact s3://bucket/orders
    """
    with _until_stopped(log) as (opened, stop, on_progress):
        began = time.monotonic()
        with tiering(opened, on_progress=on_progress, target=target, pool=task_pool(workers)) as tierer:
            done = tierer.compact(purge=purge, everything=everything, stop=stop)
        seconds = time.monotonic() - began
        fields = {
            **_of(opened),
            "made": _each(done.made),
            "replaced": _each(done.replaced),
            "erased": done.erased,
            "held_back": done.held_back,
            "seconds": round(seconds, 3),
            "stopped": stop.is_set(),
        }
        show.answer(fields, _compacted(done, seconds, stopped=stop.is_set()))


def _compacted(done: Compacted, seconds: float, *, stopped: bool) -> str:
    made = f"{_counted(done.replaced)} became {_counted(done.made)}" if done.made else "nothing to rewrite"
    parts = [("stopped: " if stopped else "") + f"{made}, in {show.seconds(seconds)}"]
    if done.erased:
        parts.append(f"the values of {show.counted(done.erased, 'record')} erased")
    if done.held_back:
        parts.append(
            f"{show.counted(done.held_back, 'segment')} not searched: the log itself still has their records "
            "(see 'strandline trim')"
        )
    return "; ".join(parts)


# --- by hand ---------------------------------------------------------------------------------------------------


@tier.command()
@_guarded
def truncate(
    log: Place,
    *,
    since: Annotated[int, option("OFFSET", "The first offset that is removed from the cold tier.", "--from", min=0)],
    yes: Yes = False,
) -> None:
    """Remove everything from an offset on from the cold tier, for good: the log itself diverges there.

    For a log that was restored from an older copy, has accepted other records since, and should stay as it is: 'tier
    run' refuses such a log, and names the offset. The next run copies the log's own records. Nothing below the
    offset is removed, and nothing at all if the log itself does not continue from there.

    Example: strandline tier truncate ./orders --from 40000
    """
    question = f"Remove everything from offset {since:,} on from the cold tier of {log}, for good?"
    confirm(question, yes=yes)
    with tierable_log(log, writes=True) as opened:
        with tiering(opened) as tierer:
            gone = tierer.truncate(since)
        text = f"{_counted(gone)} cut or removed; the cold tier ends at {since:,} or before."
        show.answer({**_of(opened), "next": since, "retired": _each(gone)}, text)


# --- as a service ----------------------------------------------------------------------------------------------


@tier.command()
@_guarded
def serve(
    log: Place,
    *,
    interval: Annotated[Any, span_of_time("How long to wait between two rounds, a second at least.")] = "10s",
    segments: SegmentOptions,
    compact: Annotated[bool, flag("Also merge small segments, once an hour.", "--compact")] = False,
    metrics: Metrics,
    quiet: Quiet = False,
) -> None:
    """Keep the cold tier in step with its log, round after round, until Ctrl-C or SIGTERM.

    Prints one line when it begins, and logs each round that did something to standard error. Transient errors
    are retried. Stopping leaves no partial copy. Of several for one log, the last one to start works. The other
    ends with status 3. A write-ahead log must not be open elsewhere: its own process tiers it (``sl.tier.tiering``).

    Example: strandline tier serve s3://bucket/orders --interval 1m
    """
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    interval = max(1, interval)
    with (
        stop_on_signal() as stop,
        metrics.served() as health,
        tierable_log(log, writes=True) as opened,
    ):
        with tiering(opened, on_progress=_log_step, **segments.settings) as tierer:
            of = _of(opened)
            text = f"{of['url']} is tiered to {of['store']}, every {show.seconds(interval)}."
            show.answer({**of, "interval": interval}, text)

            def on_round(done: Round) -> None:
                health.ready()
                _log_round(done)

            tierer.run(stop, pause=interval, compact=compact, on_round=on_round)
        _LOGGER.info("Stopped: no copy is left unfinished.")


def _log_step(step: TieringStep) -> None:
    _LOGGER.info("%s", line(step).strip())


def _log_round(done: Round) -> None:
    if done.copied or done.expired or done.removed or done.swept or done.retired:
        taken = sum(segment.size for segment in done.copied)
        _LOGGER.info(
            "Round: %d copied (%s), %d expired, %d left over and removed, %d swept, %d of another history retired.",
            len(done.copied), show.size(taken), len(done.expired), len(done.removed), len(done.swept),
            len(done.retired),
        )  # fmt: skip


tier.command()(status)
