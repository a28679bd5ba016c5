"""``strandline demo``: starts, kills and restarts the demo's processes, and compares their tables."""

from __future__ import annotations

import json as encoder
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import RenderableType
from rich.constrain import Constrain

from strandline.cli.demo.changes import DemoWorkload
from strandline.cli.demo.comparison import compare, truth
from strandline.cli.demo.page import page
from strandline.cli.demo.processes import (
    LATE_SLOT,
    SLOT,
    STALLED_SLOT,
    DemoFolder,
    Process,
    ProcessGroup,
    read_marker,
    write_marker,
)
from strandline.cli.demo.report import DemoEvent, DemoResult, Sample, event_line, summary
from strandline.cli.logs.lag import current_lag
from strandline.cli.shared import output as show
from strandline.cli.shared.common import guarded
from strandline.cli.shared.options import option
from strandline.errors import MissingExtra, NotReady, StrandlineError
from strandline.log.object.log import open_log
from strandline.storage.retry import Backoff

_POLL: Final = 0.2
_SAMPLE_INTERVAL: Final = 1.0
_PRINT_INTERVAL: Final = 5.0
_TIMEOUT: Final = 180.0
_MILLION: Final = 1_000_000
_START: Final = Backoff(attempts=3, base=2.0, ceiling=8.0)
"""Starts of Spark in one run: its workers may not get on soon enough on a busy machine."""

# The share of the changes that must be in the table before the n-th kill of Spark; and the share that the producers may
# append: before Spark is up, during the n-th run, once the first kill is prepared (each query then needs one more
# batch), and while Spark is down. So every kill can lose data, and the end follows the last restart.
_ALLOWED_BEFORE: Final = 0.30
_KILLED: Final = {1: 0.40, 2: 0.70}
_ALLOWED: Final = {1: 0.50, 2: 0.78, 3: 1.0}
_ALLOWED_FOR_THE_KILL: Final = 0.58
_ALLOWED_WHILE_DOWN: Final = {1: 0.66, 2: 0.92}
_STALLED: Final = 0.05

_INTRODUCTION: Final = (
    "{records:,} changes of {keys:,} orders from {producers} processes go into a log, as JSON. Spark follows it into a "
    "typed Delta table of the latest orders. In the same session runs a naive twin, which knows only its checkpoint. "
    "Both are killed twice: first at a moment that we choose, when each has written a batch and not yet recorded it "
    "(every batch passes through that moment, an accident seldom hits it); then at any moment, and the checkpoint is "
    "deleted. A million changes take about two minutes.\n"
)
_CHANGES_OF_A_KEY: Final = 10
"""Changes of each order, on average."""
_PARAGRAPH: Final = 100
"""The most columns of a paragraph."""


@guarded
def demo(
    *,
    records: Annotated[int, option("N", "How many changes.", min=1000)] = 1_000_000,
    dir: Annotated[  # noqa: A002
        Path | None, option("FOLDER", "Keep log, table and report in this new folder.")
    ] = None,
) -> None:
    """Kill Spark at its worst moments, and count what is wrong.

    Several processes append changes of orders to a log while Spark follows it into a typed Delta table. Beside it runs
    a naive twin that trusts the checkpoint alone, which is deleted. Needs the extras spark, delta and typed, and Java.
    Ends with status 0 only if our tables are exact.

    Example: strandline demo --records 200000
    """
    if dir is not None and dir.exists() and any(dir.iterdir()):
        raise typer.BadParameter(f"--dir {dir} is not empty.")
    for module, extra in (("pyspark", "spark"), ("deltalake", "delta"), ("msgspec", "typed")):
        if find_spec(module) is None:
            raise MissingExtra(f"The demo needs the extra {extra!r}: pip install 'strandline[{extra}]'.")
    folder, kept = DemoFolder(_new_folder(dir)), set[Path]()
    report = folder.path / "report.html"
    try:
        result = _run(DemoWorkload(records, records // _CHANGES_OF_A_KEY), folder)
        report.write_text(page(result), encoding="utf-8")
        kept = {report}
    except StrandlineError:
        kept = {folder.output}  # the error names a file of it
        raise
    finally:
        if dir is None:
            for found in set(folder.path.iterdir()) - kept:
                shutil.rmtree(found, ignore_errors=True)
            with suppress(OSError):
                folder.path.rmdir()
    document = {**result.fields(), "report": str(report)}
    show.answer(document, lambda: summary(result), f"Report: {report}")
    if not result.comparison.exact:
        raise typer.Exit(1)


def _new_folder(asked: Path | None) -> Path:
    """A folder that no other process can have prepared: the demo writes only into it."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="strandline-demo-"))
    folder = asked.absolute()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    return folder


def _run(workload: DemoWorkload, folder: DemoFolder) -> DemoResult:
    """Run the demo. SIGTERM cleans up as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with ProcessGroup() as processes:
            printed = (lambda _: None) if show.for_programs() else show.out().print
            return Demo(workload, folder, processes, printed).run()
    finally:
        signal.signal(signal.SIGTERM, before)


class Demo:
    """One run. The producers are throttled, so that changes are pending whenever the pipeline is down."""

    def __init__(
        self,
        workload: DemoWorkload,
        folder: DemoFolder,
        processes: ProcessGroup,
        show: Callable[[RenderableType], None],
    ) -> None:
        """Create the log; starts nothing."""
        self.result = DemoResult(workload)
        self._shape = workload
        self._folder = folder
        self._processes = processes
        self._show = show
        self._began = time.monotonic()
        self._producers: list[Process] = []
        self._run = 0
        self._next_sample = 0.0
        self._next_print = 0.0
        folder.prepare()
        self._log = open_log(folder.log, create=True)

    def run(self) -> DemoResult:
        """Run the whole schedule."""
        self._show(Constrain(_INTRODUCTION.format_map(asdict(self._shape)), _PARAGRAPH))
        self._event("start", "Spark starts, with our table and a naive twin in one session")
        self._start_producers()
        self._start_stalled_consumer()
        spark = self._start_spark(1)
        spark = self._kill_in_the_middle_of_a_batch(spark)
        late = self._start_late_consumer()
        spark = self._kill_and_delete_checkpoints(spark)
        self._finish(spark, late)
        self._show("Computing the truth from the generator, and comparing …")
        self.result.comparison = compare(self._folder, truth(self._shape))  # while Spark stops
        self._until(lambda _: not spark.running, "Spark to stop")
        self.result.seconds = self._now()
        return self.result

    # --- the steps ---------------------------------------------------------------------------------------------

    def _start_spark(self, run: int) -> Process:
        child = self._brought_up(run)
        self._run = run
        self._event("up", f"Spark is up, run {run}; the table is at offset {self._sample().orders:,}")
        self._allow(_ALLOWED[run])
        return child

    def _brought_up(self, run: int) -> Process:
        """A Spark process whose queries are up. On a busy machine a start may fail, and is tried again."""
        is_up = self._folder.up(run).exists
        why = ""
        for attempt in range(_START.attempts):
            tried = f"-try-{attempt + 1}" if attempt else ""
            child = self._start(f"spark-{run}{tried}", str(self._folder.path), str(run), module="pipeline")
            self._until(lambda _, child=child: is_up() or not child.running, f"Spark to start (run {run})")  # type: ignore[misc]
            if is_up():
                return child
            why = child.failure or "it ended without an error."
            if child.is_refused:
                child.check()
            self._processes.kill(child)
            if attempt + 1 < _START.attempts:
                self._event("retry", f"Spark did not start ({why}) and is tried again")
                later = self._now() + _START.pause(attempt, 1.0)
                self._until(lambda now, later=later: now.at >= later, "the next try")  # type: ignore[misc]
        raise NotReady(
            f"Spark did not start in {_START.attempts} tries: {why} Run the demo again when the machine is less busy; "
            f"all that Spark printed is in {self._folder.output}."
        )

    def _start_producers(self) -> None:
        rate = self._shape.records / (15 + 35 * min(1.0, self._shape.records / 1_000_000)) / self._shape.producers
        for index in range(self._shape.producers):
            arguments = [self._folder.log, encoder.dumps(asdict(self._shape)), str(index), str(rate)]
            self._producers.append(self._start(f"producer-{index}", "produce", *arguments))
        self._allow(_ALLOWED_BEFORE)
        paced = rate * self._shape.producers
        self._event("start", f"{self._shape.producers} producers start, paced at {paced:,.0f} records/s together")

    def _start_stalled_consumer(self) -> None:
        upto = int(self._shape.records * _STALLED)
        self._start("stalled", "consume", self._folder.log, self._folder.stalled, "latest", STALLED_SLOT, str(upto))
        self._event("join", f"a consumer with slot {STALLED_SLOT!r} joins; it will stop for good at offset {upto:,}")

    def _kill_in_the_middle_of_a_batch(self, spark: Process) -> Process:
        folder = self._folder
        self._wait_for_table(_KILLED[1])
        write_marker(folder.hold)
        self._allow(_ALLOWED_FOR_THE_KILL)
        held = [folder.held(query) for query in (SLOT, "naive")]
        self._until(lambda _: all(marker.exists() for marker in held), "both queries to have written a batch")
        self._kill(
            spark, "SIGKILL: each query has written a batch to its table that its slot or checkpoint does not have yet"
        )
        folder.hold.unlink()
        self._allow(_ALLOWED_WHILE_DOWN[1])
        self._show("\nLag while Spark is down:")
        self._show(current_lag(self._log).rendered())
        self._show("")
        return self._start_spark(2)

    def _start_late_consumer(self) -> Process:
        end = str(self._shape.records)
        late = self._start("late", "consume", self._folder.log, self._folder.changes, "append", LATE_SLOT, end)
        self._event("join", "a second consumer joins late and reads all changes from the beginning, without Spark")
        return late

    def _kill_and_delete_checkpoints(self, spark: Process) -> Process:
        self._wait_for_table(_KILLED[2])
        self._kill(spark, "SIGKILL, at no particular moment")
        self._allow(_ALLOWED_WHILE_DOWN[2])
        shutil.rmtree(self._folder.checkpoints)
        self._event("checkpoint", "the checkpoint is deleted")
        return self._start_spark(3)

    def _finish(self, spark: Process, late: Process) -> None:
        end = self._shape.records
        self._until(lambda now: now.produced >= end, "all changes to be produced")
        self._event("done", f"all {end:,} changes are produced")
        self._until(lambda now: min(now.orders, now.naive, now.changes) >= end, "everybody to reach the end")
        self._until(lambda _: not late.running, "the late consumer to end")
        self.result.lag = current_lag(self._log)
        self._event("done", f"everybody is at offset {end:,}; the log ends at {self.result.lag.bounds.next:,}")
        write_marker(self._folder.stop)

    # --- helpers -----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _start(self, name: str, *arguments: str, module: str = "workers") -> Process:
        output = self._folder.output / f"{name}.txt"
        return self._processes.start(name, f"strandline.cli.demo.{module}", list(arguments), output)

    def _kill(self, spark: Process, text: str) -> None:
        self._processes.kill(spark)
        self._run = 0
        self._event("kill", text)

    def _allow(self, part: float) -> None:
        for index, producer in enumerate(self._producers):
            share = self._shape.share(index)
            producer.send(str(share if part >= 1 else int(share * part)))

    def _event(self, kind: str, text: str) -> None:
        event = DemoEvent(self._now(), kind, text)
        self.result.events.append(event)
        self._show(event_line(event))

    def _sample(self) -> Sample:
        slots = {state.name: state.position for state in self._log.slots.list()}
        return Sample(
            at=self._now(),
            produced=self._log.bounds().next,
            orders=slots.get(SLOT, 0),
            naive=read_marker(self._folder.naive_position) or 0,
            changes=slots.get(LATE_SLOT, 0),
            run=self._run,
        )

    def _wait_for_table(self, part: float) -> None:
        wanted = int(self._shape.records * part)
        self._until(lambda now: now.orders >= wanted, f"the table to reach offset {wanted:,}")

    def _until(self, done: Callable[[Sample], bool], what: str) -> None:
        """Wait for a condition and take samples; a failed process or a timeout ends the demo."""
        deadline = self._now() + _TIMEOUT
        while True:
            now = self._sample()
            if now.at >= self._next_sample:
                self._next_sample = now.at + _SAMPLE_INTERVAL
                self.result.samples.append(now)
            if now.at >= self._next_print:
                self._next_print = now.at + _PRINT_INTERVAL
                self._show(_progress(now))
            if done(now):
                return
            self._processes.check()
            if now.at > deadline:
                raise NotReady(
                    f"The demo waited {_TIMEOUT:.0f} seconds for {what}, in vain; is the machine very busy? The "
                    f"output of its processes is in {self._folder.output}."
                )
            time.sleep(_POLL)


def _progress(now: Sample) -> str:
    """One line of progress, which fits into 80 columns."""
    readers = {"log": now.produced, "orders": now.orders, "naive": now.naive, "late": now.changes}
    return "  ".join([f"{now.at:4.0f} s", *(f"{name} {_short(offset)}" for name, offset in readers.items())])


def _short(count: int) -> str:
    """A count in four characters.

    >>> _short(0), _short(41_292), _short(1_000_000)
    ('  0k', ' 41k', '1.0M')
    """
    return f"{count // 1000:>3}k" if count < _MILLION else f"{count / _MILLION:.1f}M"
