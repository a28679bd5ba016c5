"""The demo's plot: who is started, killed and started again, and when. Everything is a process of its own."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from strandline.cli.demo.children import Child, Family
from strandline.cli.demo.generator import Shape
from strandline.cli.demo.places import LATE_SLOT, OUTPUT, SLOT, STALLED_SLOT, Places, ask, tell
from strandline.cli.demo.results import compare
from strandline.cli.demo.screen import Screen
from strandline.cli.demo.story import Event, Sample, Story
from strandline.cli.demo.truth import truth
from strandline.cli.lag import look, rendered
from strandline.errors import NotReady
from strandline.log.object.log import open_log

_LOOK: Final = 0.2
_SAMPLE: Final = 1.0
_PATIENCE: Final = 180.0
_MODULES: Final = "strandline.cli.demo"

# What part of the changes has to be in the table before Spark is killed for the n-th time; and what part may have
# been produced: during the n-th run, once the first kill is prepared (each query then needs one more batch), and while
# Spark is down. So there is always something to lose, and the end comes after the last restart.
_KILLED: Final = {1: 0.40, 2: 0.70}
_ALLOWED: Final = {1: 0.50, 2: 0.78, 3: 1.0}
_ALLOWED_FOR_THE_KILL: Final = 0.58
_ALLOWED_WHILE_DOWN: Final = {1: 0.66, 2: 0.92}
_STALLED: Final = 0.05


_INTRODUCTION: Final = """\
{records:,} changes of {keys:,} orders (seed {seed}) from {producers} processes go into a log. Spark follows it into a
Delta table. In the same session a naive twin, which knows only its checkpoint, does so too. Both are killed twice:
first at a moment that we choose, when each has written a batch and not yet recorded it (every batch passes
through that moment, an accident seldom hits it); then at any moment, and both checkpoints are deleted.
"""


class Demo:
    """One run. The changes are paced, so that there is something to lose whenever the pipeline is down."""

    def __init__(self, shape: Shape, places: Places, family: Family, screen: Screen) -> None:
        """Make the log; nothing runs yet."""
        self.story = Story(shape)
        self._shape = shape
        self._places = places
        self._family = family
        self._screen = screen
        self._began = time.monotonic()
        self._producers: list[Child] = []
        self._run = 0
        self._last_sample = float("-inf")
        places.prepare()
        self._log = open_log(places.log, create=True)

    def play(self) -> Story:
        """Everything, in order."""
        self._screen.say(_INTRODUCTION.format_map(asdict(self._shape)))
        self._event("start", "Spark starts, with our pipeline and a naive twin in one session")
        spark = self._start_spark(1)
        self._start_producers()
        self._stall_a_consumer()
        spark = self._kill_in_the_middle_of_a_batch(spark)
        late = self._join_late()
        spark = self._kill_and_delete_checkpoints(spark)
        self._finish(spark, late)
        self._screen.say("Computing the truth from the generator, and comparing …")
        self.story.results = compare(self._places, truth(self._shape))
        self.story.seconds = self._now()
        return self.story

    # --- the acts ----------------------------------------------------------------------------------------------

    def _start_spark(self, run: int) -> Child:
        child = self._child(f"spark-{run}", "pipeline", str(self._places.home), str(run))
        self._until(lambda _: self._places.up(run).exists(), f"Spark to start (run {run})")
        self._run = run
        self._event("up", f"Spark is up, run {run}; the table is at offset {self._sample().orders:,}")
        self._allow(_ALLOWED[run])
        return child

    def _start_producers(self) -> None:
        rate = self._shape.records / (20 + 50 * min(1.0, self._shape.records / 1_000_000)) / self._shape.producers
        for index in range(self._shape.producers):
            arguments = [str(self._places.home), json.dumps(asdict(self._shape)), str(index), str(rate)]
            self._producers.append(self._child(f"producer-{index}", "producer", *arguments))
        self._allow(_ALLOWED[self._run])
        paced = rate * self._shape.producers
        self._event("start", f"{self._shape.producers} producers start, paced at {paced:,.0f} records/s together")

    def _stall_a_consumer(self) -> None:
        upto = int(self._shape.records * _STALLED)
        self._child("stalled", "consumer", self._places.log, self._places.stalled, "latest", STALLED_SLOT, str(upto))
        self._event("join", f"a consumer with slot {STALLED_SLOT!r} joins; it will stop for good at offset {upto:,}")

    def _kill_in_the_middle_of_a_batch(self, spark: Child) -> Child:
        places = self._places
        self._wait_for_table(_KILLED[1])
        tell(places.hold)
        self._allow(_ALLOWED_FOR_THE_KILL)
        both = [places.held("orders"), places.held("naive")]
        self._until(lambda _: all(place.exists() for place in both), "both queries to have written a batch")
        self._kill(
            spark, "SIGKILL: each query has written a batch to its table that its checkpoint does not know of yet"
        )
        places.hold.unlink()
        self._allow(_ALLOWED_WHILE_DOWN[1])
        self._screen.say("\nWho is behind while it is down:")
        self._screen.say(rendered(look(self._log)))
        self._screen.say()
        return self._start_spark(2)

    def _join_late(self) -> Child:
        end = str(self._shape.records)
        late = self._child("late", "consumer", self._places.log, self._places.history, "append", LATE_SLOT, end)
        self._event("join", "a second consumer joins late and reads all changes from the beginning, without Spark")
        return late

    def _kill_and_delete_checkpoints(self, spark: Child) -> Child:
        self._wait_for_table(_KILLED[2])
        self._kill(spark, "SIGKILL, at no particular moment")
        self._allow(_ALLOWED_WHILE_DOWN[2])
        shutil.rmtree(self._places.checkpoints)
        self._event("checkpoint", "both checkpoints are deleted")
        return self._start_spark(3)

    def _finish(self, spark: Child, late: Child) -> None:
        end = self._shape.records
        self._until(lambda now: now.produced >= end, "all changes to be produced")
        self._event("done", f"all {end:,} changes are produced")
        self._until(lambda now: min(now.orders, now.naive, now.history) >= end, "everybody to reach the end")
        self._until(lambda _: not late.running, "the late consumer to end")
        self.story.lag = look(self._log)
        self._event("done", f"everybody is at offset {end:,}; the log ends at {self.story.lag.next:,}")
        tell(self._places.stop)
        self._until(lambda _: not spark.running, "Spark to stop")
        self.story.exposed = ask(self._places.exposed)

    # --- the means ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _child(self, name: str, module: str, *arguments: str) -> Child:
        return self._family.start(name, f"{_MODULES}.{module}", list(arguments), self._places.output(name))

    def _kill(self, spark: Child, text: str) -> None:
        spark.kill()
        self._family.forget(spark)
        self._run = 0
        self._event("kill", text)

    def _allow(self, part: float) -> None:
        for index, producer in enumerate(self._producers):
            share = self._shape.share(index)
            producer.tell(str(share if part >= 1 else int(share * part)))

    def _event(self, kind: str, text: str) -> None:
        event = Event(self._now(), kind, text)
        self.story.events.append(event)
        self._screen.event(event)

    def _sample(self) -> Sample:
        slots = {state.name: state.position for state in self._log.slots()}
        return Sample(
            at=self._now(),
            produced=self._log.bounds().next,
            orders=slots.get(SLOT, 0),
            naive=ask(self._places.naive_status) or 0,
            history=slots.get(LATE_SLOT, 0),
            run=self._run,
        )

    def _wait_for_table(self, part: float) -> None:
        wanted = int(self._shape.records * part)
        self._until(lambda now: now.orders >= wanted, f"the table to reach offset {wanted:,}")

    def _until(self, done: Callable[[Sample], bool], what: str) -> None:
        """Wait for something, sampling each second; a child that fails, or too long a wait, ends the demo."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            now = self._sample()
            if now.at - self._last_sample >= _SAMPLE:
                self._last_sample = now.at
                self.story.samples.append(now)
                self._screen.update(now)
            if done(now):
                return
            self._family.check()
            if time.monotonic() > deadline:
                raise NotReady(
                    f"The demo waited {_PATIENCE:.0f} seconds for {what}, in vain; is the machine very busy? What "
                    f"its processes printed is in {self._places.home / OUTPUT}."
                )
            time.sleep(_LOOK)
