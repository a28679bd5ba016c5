"""The cold tier of a simulated cluster: one store and one topic for all machines, each with a line of its own.

A round of tiering is a thread of its own: at each request to the store and each event, the rest of the world may go on,
the same machine included, and the machine may die in the middle of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from strandline.errors import StrandlineError, TransientStorageError
from strandline.log.topic.memory import MemoryTopic
from strandline.model.segments import ColdTier
from strandline.node.lead.tiering import NodeColdTier
from strandline.node.options import TierSettings
from strandline.storage.env import Env
from strandline.testing.clock import SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.tier.copy.rounds import Round
from tests.cluster.clients import read
from tests.cluster.history import Broken
from tests.cluster.machine import Machine, MachineClock

if TYPE_CHECKING:
    from tests.cluster.simulated_cluster import World

COLD: Final = "plain://test"
_PARTITIONS: Final = 2


class LinedTopic:
    """The shared topic, as one machine reaches it. Closing it closes nothing of the others'."""

    def __init__(self, inner: MemoryTopic, line: FaultyStore, point: Callable[[], None]) -> None:
        """``point`` is called before and after each event is published."""
        self._inner, self._line, self._point = inner, line, point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, partition: int, payload: bytes) -> int:
        """Publish one event."""
        return self.publish_all(partition, [payload])[0]

    def publish_all(self, partition: int, payloads: Sequence[bytes]) -> list[int]:
        """Publish events, unless the machine is cut off from the store."""
        self._point()
        if self._line._down:
            raise TransientStorageError("The topic cannot be reached.")
        offsets = self._inner.publish_all(partition, payloads)
        self._point()
        return offsets

    def close(self) -> None:
        """Do nothing: the others use it."""


class SimulatedColdTier:
    """The store and the topic, and the lines of the machines to them."""

    def __init__(self, world: World, dice: random.Random) -> None:
        """Settings are drawn: small segments, perhaps few of them."""
        self.world = world
        self.settings = TierSettings(
            target=dice.choice((1, 200, 1000)),
            linger=0.0,
            retention=dice.choice(("forever", "forever", "bytes:4KiB")),
            partitions=_PARTITIONS,
        )
        self._store = PlainStore(clock=MachineClock(world.time))
        self._topic = MemoryTopic(_PARTITIONS, env=Env(chance=SeededChance(dice.getrandbits(32))))
        self._tiering: list[str] = []
        """Machines in the middle of a round, the innermost last."""
        self._running: str | None = None
        """The one whose round goes on now; None while it stands still."""
        self.switches = 0.05
        """How likely a round stands still at a request."""
        self._seed = dice.getrandbits(32)
        self.lines: dict[str, FaultyStore] = {}
        for name in ("a", "b", "c"):
            line = self.lines[name] = FaultyStore(
                self._store, seed=dice.getrandbits(32), faults=world.climate.store, clock=MachineClock(world.time)
            )
            line.hook(partial(self._on_request, name))

    def opener(self, machine: Machine) -> Callable[[str, UUID], NodeColdTier]:
        """What a node on this machine opens its cold tier with."""
        line = self.lines[machine.name]
        self._seed += 1
        chance = SeededChance(self._seed)

        def topic(cold: ColdTier, create: bool) -> Any:
            del cold, create
            return LinedTopic(self._topic, line, lambda: self._perhaps_switch(machine.name, self.switches))

        def opened(url: str, log_id: UUID) -> NodeColdTier:
            del url
            return NodeColdTier(
                line,
                log_id,
                self.settings,
                open_topic=topic,
                background=False,
                env=Env(clock=machine.clock, chance=chance),
            )

        return opened

    def rate(self, call: Call) -> float:
        """How likely a round stands still at this request."""
        del call
        return self.switches

    def _on_request(self, name: str, call: Call) -> None:
        self._perhaps_switch(name, self.rate(call))

    def _perhaps_switch(self, name: str, rate: float) -> None:
        """Perhaps the thread that tiers stands still here, while everything else goes on."""
        world = self.world
        if self._running != name or len(self._tiering) > 2 or not world.network.chance(rate):
            return
        machine = world.machines[name]
        node = machine.node
        if node is None or node._cold is None or node._cold._lock.locked():
            return  # another thread would wait for the lock
        world.counts["switches"] += 1
        self._running = None
        self.switch(name)
        self._running = name
        if machine.node is not node:
            raise Crash(f"{name} died in a round of tiering")

    def switch(self, name: str) -> None:
        """What happens while the round of a machine stands still."""
        del name
        for _ in range(self.world.dice.choice((1, 5, 40, 120))):
            self.world.step()

    def check_whole(self) -> None:
        """All is well: the log can be tiered to its end, and every node shows all that is retained."""
        machines = self.world.machines.values()
        (primary,) = [machine.running for machine in machines if machine.running.is_primary]
        try:
            primary.tier(everything=True)
        except StrandlineError as error:
            raise Broken(f"in the end the log cannot be tiered: {type(error).__name__} {error}") from error
        firsts = {machine.name: machine.running.reading().bounds().first for machine in machines}
        if self.settings.retention == "forever" and any(firsts.values()):
            raise Broken(f"in the end records are in neither tier: nodes begin at {firsts}")

    def round(self) -> None:
        """A node that says it leads makes a round of tiering, and forgets what it may."""
        world = self.world
        leading = [
            machine
            for machine in world.ready()
            if machine.running.condition == "leading" and machine.name not in self._tiering
        ]
        if leading:
            self.round_of(world.dice.choice(leading))

    def round_of(self, machine: Machine) -> None:
        """A machine whose node leads makes a round of tiering, and forgets what it may."""
        world = self.world
        node = machine.running
        if self.settings.retention != "forever":  # nobody can look at it later
            found = read(machine.name, node)
            if found is None:
                return
            world.looked(found)
        self._tiering.append(machine.name)
        former, self._running = self._running, machine.name
        try:
            done = node.tier(everything=True)
            if done is not None:
                world.counts["segments"] += len(done.copied)
                world.counts["retired"] += len(done.retired)
                world.counts["expired"] += len(done.expired)
                world.tiered(machine, done)
            primary = node.primary
            upto = primary.committed - world.dice.randrange(4)
            if upto > 0:
                world.note(f"{machine.name} tiered {_told(done)}, and trimmed up to {primary.trim(upto)}")
        except StrandlineError as error:
            world.counts["rounds failed"] += 1
            world.note(f"{machine.name} could not tier: {type(error).__name__} {error}")
        except Crash:
            world.counts["died tiering"] += 1
        except BaseException:
            if not machine.disk.stopped:
                raise
            world.died(machine)
        finally:
            self._tiering.pop()
            self._running = former


def _told(done: Round | None) -> str:
    """A round of tiering in a few words: the ranges that it copied and deleted."""
    if done is None:
        return "nothing"
    parts = {"copied": done.copied, "removed": done.removed, "retired": done.retired, "expired": done.expired}
    ranges = {what: [f"{each.start}-{each.end}" for each in segments] for what, segments in parts.items() if segments}
    return ", ".join(f"{what} {' '.join(found)}" for what, found in ranges.items()) or "nothing"
