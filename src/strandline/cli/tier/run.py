"""``strandline tier run`` and ``strandline tier serve``: copy closed ranges, once or continuously."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from strandline.cli import output as show
from strandline.cli.common import (
    INTERRUPTED,
    Debug,
    Json,
    confirm,
    guarded,
    length_of_time,
    log_to_stderr,
    size_in_bytes,
    told_to_stop,
)
from strandline.cli.common import retention as understood
from strandline.cli.tier.shared import Place, bytes_behind, open_to_tier
from strandline.errors import Fenced
from strandline.model.retention import TIER_SLOT, parse_retention
from strandline.model.segments import SegmentMetadata
from strandline.tier.copy.ledger import TieringStep
from strandline.tier.copy.tierer import Round
from strandline.tier.opening import cold_tier, log_address, tiering

FENCED: Final = 3
"""The status if another tierer has taken over."""

_LOGGER = logging.getLogger("strandline.tier")

Target = Annotated[
    int, typer.Option(metavar="SIZE", parser=size_in_bytes, help="About how large a segment is, at most 1GiB.")
]
Linger = Annotated[
    int,
    typer.Option(
        metavar="TIME", parser=length_of_time, help="How long records wait at most for a segment to be filled."
    ),
]
Keeping = Annotated[
    str,
    typer.Option(
        "--retention",
        metavar="POLICY",
        parser=understood,
        help="What the cold tier lets go of, oldest first and only what no slot needs: forever, consumed, age:90d or "
        "bytes:10TiB.",
    ),
]
Snapshots = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder of this tierer's own, so that the next start need not read all events again.",
        show_default=False,
    ),
]
_TARGET: Any = "256MiB"
_LINGER: Any = "1h"
# What the parsers are given.


# --- once ------------------------------------------------------------------------------------------------------


@guarded
def run(
    log: Place,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also copy what fills no segment yet and has not waited long.")
    ] = False,
    target: Target = _TARGET,
    linger: Linger = _LINGER,
    retention: Keeping = "forever",
    snapshots: Snapshots = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Copy all that fills segments to the cold tier, once; tidy up what a crash left; let go of what is too old.

    The hot tier keeps its records until its own retention lets them go ('strandline gc'), and never what is in no
    segment yet. Ctrl-C ends it before the next segment, with nothing left half-way. A tierer that serves the log is
    fenced by this, and ends; so does this, with status 3, if another one takes over meanwhile.
    """
    settings: dict[str, Any] = {"target": target, "linger": linger, "retention": parse_retention(retention)}
    told = None if json else _say
    with _fenced(debug=debug), open_to_tier(log) as opened, told_to_stop() as stop:
        began = time.monotonic()
        with tiering(opened, snapshot_dir=snapshots, on_progress=told, **settings) as tierer:
            done = tierer.run_once(everything=everything, stop=stop)
        left = _left(opened)
        seconds = time.monotonic() - began
        if json:
            url, cold = log_address(opened), cold_tier(opened)
            show.document({"url": url, "store": cold.store, **_fields(done, left, seconds), "stopped": stop.is_set()})
        else:
            show.line(_summary(done, left, seconds, stopped=stop.is_set()))
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Left:
    """What is in no segment yet."""

    records: int
    bytes: int


def _left(log: Any) -> Left:
    end = log.bounds().next
    position = next((state.position for state in log.slots() if state.name == TIER_SLOT), log.bounds().first)
    return Left(max(0, end - position), bytes_behind(log, position) if position < end else 0)


def _say(step: TieringStep) -> None:
    show.line(line(step))


def line(step: TieringStep) -> str:
    """One step of a round.

    >>> line(TieringStep("copied", "x", 0, 9_999, 1_200_000, 0.5))
    ' copied  offsets 0 to 9,999  1.2 MB at 2.4 MB/s'
    """
    if step.what == "swept":
        return f"  swept  {step.path}, which no event knew"
    said = f"{step.what:>7}  offsets {step.first:,} to {step.last:,}  {show.size(step.size)}"
    return said + (f" at {show.size(step.size / step.seconds)}/s" if step.seconds > 0 else "")


def _summary(done: Round, left: Left, seconds: float, *, stopped: bool) -> str:
    said = [("stopped: " if stopped else "") + f"{_counted(done.copied)} copied in {show.seconds(seconds)}"]
    if done.expired:
        said.append(f"{_counted(done.expired)} expired")
    if done.retired:
        said.append(f"{show.counted(len(done.retired), 'segment')} of another history than the log's cut or removed")
    if done.removed:
        said.append(f"{show.counted(len(done.removed), 'segment')} left over and removed")
    if done.swept:
        said.append(f"{show.counted(len(done.swept), 'object')} swept")
    if left.records:
        said.append(f"{show.counted(left.records, 'record')} ({show.size(left.bytes)}) in no segment yet")
    return "; ".join(said)


def _counted(segments: Iterable[SegmentMetadata]) -> str:
    held = list(segments)
    if not held:
        return "nothing"
    return (
        f"{show.counted(len(held), 'segment')} ({show.counted(_records(held), 'record')}, "
        f"{show.size(sum(segment.size for segment in held))})"
    )


def _records(segments: Iterable[SegmentMetadata]) -> int:
    return sum(segment.end - segment.start + 1 for segment in segments)


def _fields(done: Round, left: Left, seconds: float) -> dict[str, Any]:
    return {
        "copied": _each(done.copied),
        "removed": _each(done.removed),
        "expired": _each(done.expired),
        "swept": list(done.swept),
        "retired": _each(done.retired),
        "records_left": left.records,
        "bytes_left": left.bytes,
        "seconds": round(seconds, 3),
    }


def _each(segments: Iterable[SegmentMetadata]) -> list[dict[str, Any]]:
    return [
        {"id": str(segment.segment.id), "start": segment.start, "end": segment.end, "size": segment.size}
        for segment in segments
    ]


# --- by hand ---------------------------------------------------------------------------------------------------


@guarded
def truncate(
    log: Place,
    *,
    to: Annotated[int, typer.Option(min=0, help="The first offset that is removed from the cold tier.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove everything from an offset on from the cold tier, for good: the log itself went on differently there.

    For a log that was restored from an older copy, has accepted other records since, and is to stay as it is: 'tier
    run' refuses such a log, and names the offset. The log's own records are copied by the next run. Nothing below the
    offset is removed, and nothing at all if the log itself does not go on from there.
    """
    question = f"Remove everything from offset {to:,} on from the cold tier of {log}, for good?"
    confirm(question, yes=yes)
    with _fenced(debug=debug), open_to_tier(log) as opened:
        with tiering(opened) as tierer:
            gone = tierer.truncate(to)
        if json:
            url, cold = log_address(opened), cold_tier(opened)
            show.document({"url": url, "store": cold.store, "to": to, "retired": _each(gone)})
        else:
            print(f"{_counted(gone)} cut or removed; the cold tier ends at {to:,} or before.", flush=True)


# --- as a service ----------------------------------------------------------------------------------------------


def _interval(text: str) -> int:
    """An option's text as seconds, of which there is one at least."""
    return max(1, length_of_time(text))


@guarded
def serve(
    log: Place,
    *,
    interval: Annotated[
        int, typer.Option(metavar="TIME", parser=_interval, help="How long to wait between two rounds.")
    ] = "10s",  # type: ignore[assignment]  # what the parser is given
    target: Target = _TARGET,
    linger: Linger = _LINGER,
    retention: Keeping = "forever",
    snapshots: Snapshots = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings only.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Keep the cold tier in step with its log, round after round, until Ctrl-C or SIGTERM.

    Prints one line when it begins, and logs to standard error what each round did, if it did something. What may pass
    is tried again. Stopping leaves nothing half-way. Of several for one log, one works: whoever starts last. The other
    ends with status 3. A write-ahead log must not be open elsewhere: its own process tiers it (``sl.tier.tiering``).
    """
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    settings: dict[str, Any] = {"target": target, "linger": linger, "retention": parse_retention(retention)}
    with _fenced(debug=debug), open_to_tier(log) as opened, told_to_stop() as stop:
        with tiering(opened, snapshot_dir=snapshots, on_progress=_log_step, **settings) as tierer:
            _begin(opened, interval, as_json=json)
            tierer.run(stop, pause=interval, on_round=_log_round)
        _LOGGER.info("Stopped: nothing is half-way.")


def _begin(log: Any, interval: int, *, as_json: bool) -> None:
    url, cold = log_address(log), cold_tier(log)
    if as_json:
        show.document({"url": url, "store": cold.store, "interval": interval})
    else:
        show.line(f"{url} is tiered to {cold.store}, every {show.seconds(interval)}.")


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


@contextmanager
def _fenced(*, debug: bool) -> Iterator[None]:
    """Somebody else tiers this log: one sentence, and a status of its own, for whoever starts services again."""
    try:
        yield
    except Fenced as error:
        if debug:
            raise
        show.error(error)
        raise typer.Exit(FENCED) from None
