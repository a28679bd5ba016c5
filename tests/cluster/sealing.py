"""A cluster whose log a client seals at some moment, alone or with its last append, and repeats that until it knows.

All others go on meanwhile: a seal that was not acknowledged may get lost with its primary.
"""

from __future__ import annotations

import random
from typing import Any, Final

from strandline.errors import InvalidInput, StrandlineError
from strandline.testing.simdisk import CrashMode
from tests.cluster.changing_members import ReshapedWorld
from tests.cluster.faults import Climate
from tests.cluster.history import Broken, SealAcknowledged
from tests.cluster.history import Final as FinalState
from tests.cluster.machine import Machine
from tests.cluster.simulated_cluster import TERM, RunSummary, World

_PATIENCE: Final = 8
"""Steps between two attempts to seal, in the mean."""
_LATEST: Final = 450
"""The last step at which the client may begin to seal."""


class SealedWorld(World):
    """Three machines, and a client that seals the log."""

    def __init__(self, seed: int, climate: Climate | None = None, **options: Any) -> None:
        """Everything that is drawn is drawn from this seed."""
        self._is_acknowledged = False
        self._tries = 0
        dice = random.Random(~seed)  # its own
        self._begins = dice.randrange(_LATEST)
        """The step at which the client begins to seal."""
        self._with_append = dice.random() < 0.5
        self._insists = dice.random() < 0.7
        """Whether it repeats a seal of unknown outcome, and does not only try once."""
        self._cut_off = dice.choice(("primary", "replica", None))
        """Which node does not hear of the seal at first; then the primary dies, and the others go on."""
        super().__init__(seed, climate, **options)

    def step(self) -> None:
        """One thing happens; the client seals the log when its time has come."""
        super().step()
        self._perhaps_seal()

    def turn(self) -> None:
        """A node does the next thing; in the end the client goes on, too."""
        super().turn()
        if not self.climate.trouble:
            self._perhaps_seal()

    def _perhaps_seal(self) -> None:
        if self.steps < self._begins or self._is_acknowledged:
            return
        if self._with_append:
            writer = self.writers[0]
            if writer.seals is None:
                writer.seals = writer.number
                self.note(f"{writer.name} seals the log with its number {writer.seals}")
        elif (self._insists or not self._tries) and self.dice.randrange(_PATIENCE) == 0:
            self._seal()

    def _seal(self) -> None:
        leading = [machine for machine in self.ready() if machine.running.condition == "leading"]
        if not leading:
            return
        machine = self.dice.choice(leading)
        self._tries += 1
        if self._tries == 1:
            self._cut(machine.name)

        def seal() -> SealAcknowledged:
            primary = machine.running.primary
            return SealAcknowledged(machine.name, primary.term, primary.seal(timeout=0.0).next)

        try:
            told = self.within(machine, seal)
        except (StrandlineError, InvalidInput) as error:
            self.note(f"{machine.name} was asked to seal the log: {type(error).__name__} {error}")
            self.counts["seals in doubt"] += 1
            if self._cut_off == "primary":
                self._lose(machine)
            return
        if told is not None:
            self.checker.take(told)
            self.counts["seals acknowledged"] += 1
            self._is_acknowledged = True
            self.note(f"{machine.name} sealed the log at {told.at} in term {told.term}")
            if self._cut_off == "replica":
                self._lose(machine)

    def _cut(self, primary: str) -> None:
        others = [name for name in self.names if name != primary]
        if self._cut_off == "primary":
            self.network.cuts.update(frozenset((primary, name)) for name in others)
            self.note(f"{primary} is cut off when it is to seal the log")
        elif self._cut_off == "replica":
            alone = self.dice.choice(others)
            self.machines[alone].paused = self.time.now + 4 * TERM
            self.note(f"{alone} stands still when {primary} is to seal the log")

    def _lose(self, machine: Machine) -> None:
        """The primary dies for longer than a lease, and the others reach each other."""
        self._cut_off = None
        self.network.cuts.clear()
        for each in self.machines.values():
            each.paused = min(each.paused, self.time.now)
        if machine.node is not None:
            self.crash(machine, CrashMode.KILL)
            machine.starts += 3 * TERM

    def write(self) -> None:
        """A writer goes on; one that hears that the log was sealed takes that for final."""
        before = [writer for writer in self.writers if writer.refused is None]
        super().write()
        for told in [writer.refused for writer in before if writer.refused is not None]:
            self.checker.take(told)
            self.counts["refused"] += 1

    def _final(self) -> FinalState:
        final = super()._final()
        self.counts["sealed" if final.sealed else "unsealed"] += 1
        held = {(entry.writer, entry.number) for _, log in final.logs.values() for entry in log}
        withdrawn = {(writer.name, number) for writer in self.writers for number in writer.withdrawn}
        if found := withdrawn & held:
            raise Broken(f"{found} were refused since the log was sealed, and are in it")
        return final


class SealedReshapedWorld(SealedWorld, ReshapedWorld):
    """Four machines, an operator who changes the members, and a client that seals the log."""


def seal(
    seed: int, steps: int = 500, climate: Climate | None = None, *, tiered: bool = False, reshaped: bool = False
) -> RunSummary:
    """Tell the history of a seed, and check it; ``reshaped``: while the members of the log change."""
    if reshaped:
        return SealedReshapedWorld(seed, climate).play(steps)
    return SealedWorld(seed, climate, tiered=tiered).play(steps)
