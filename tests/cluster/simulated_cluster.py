"""A whole cluster in one thread: three nodes as in production, on simulated machines, in an order drawn from a seed."""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from strandline.errors import StorageError
from strandline.node.lead.policies import Quorum
from strandline.node.messages import Caller, Upstream
from strandline.node.node import Node
from strandline.node.node_folder import QUARANTINE, NodeFolder
from strandline.node.options import NodeOptions
from strandline.storage.env import Env
from strandline.storage.lease import Lease
from strandline.testing.clock import SeededChance
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import CrashMode
from strandline.tier.copy.rounds import Round
from tests.cluster import history
from tests.cluster.clients import ClientWriter, entries, read, shown
from tests.cluster.cold_tier import COLD, SimulatedColdTier
from tests.cluster.consumers import ClientConsumer, read_from_slots
from tests.cluster.faults import Climate
from tests.cluster.history import Acknowledged, Broken, Checker, Read, TermsSeen
from tests.cluster.machine import Machine, MachineClock, Time, WatchedDisk
from tests.cluster.network import Network, SimulatedLink

R = TypeVar("R")

NAMES: Final = ("a", "b", "c")
TERM: Final = 2.0
"""Seconds of a lease."""
POLL: Final = 0.4
"""Seconds between two heartbeats of a node that has nothing to say."""
_SETTLING: Final = 3000
"""Steps within which all has to be well again when nothing goes wrong any more."""
_STORY: Final = 80
"""How much of the story is told of a history that broke."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What happened, for tests that make sure that something did."""

    seed: int
    steps: int
    counts: Counter[str]
    digest: int
    """Equal for two runs of the same history."""


class World:
    """Three machines, three writers, and everything between them; :meth:`play` tells a whole history."""

    names: tuple[str, ...] = NAMES
    """The machines."""

    def __init__(self, seed: int, climate: Climate | None = None, *, tiered: bool = False) -> None:
        """Everything that is drawn is drawn from this seed; what goes wrong, too, unless a climate is given.

        ``tiered``: the log has a cold tier.
        """
        self.seed = seed
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=_STORY)
        self.digest = 0
        self.checker = Checker()
        self.time = Time()
        self.dice = dice = random.Random(seed)
        self.climate = climate or Climate.drawn(dice)
        self.machines: dict[str, Machine] = {}
        self.network = Network(self.machines, self.time, dice, died=self.died, promised=self.checker.take)
        self.network.weather = self.climate.weather
        self.leaders: dict[int, str] = {}
        """Who led in which term."""
        self.recovering: set[str] = set()
        """Who lost its disk, and has not got everything again."""
        place = PlainStore(clock=MachineClock(self.time))
        for name in self.names:
            clock = MachineClock(self.time, drift=dice.uniform(-0.005, 0.005), skew=dice.uniform(-60, 60))
            line = FaultyStore(place, seed=dice.getrandbits(64), faults=self.climate.store, clock=clock)
            self.machines[name] = Machine(name, self.new_disk(name), clock, line, founds=name == "a")
        self.cold = self.new_cold(dice) if tiered else None
        self.highest_start = 0
        """The highest offset at which the log of a node ever began."""
        self.writers = [ClientWriter(f"w{number}") for number in range(3)]
        self.consumers = [ClientConsumer(f"c{number}") for number in range(2)]

    def new_disk(self, name: str) -> WatchedDisk:
        """An empty disk for a machine."""
        disk = WatchedDisk(self.dice.getrandbits(64))
        disk.asked = lambda: self._send_ahead(name)
        if self.climate.stall:
            disk.told = lambda: self._perhaps_stall(name)
        return disk

    def new_cold(self, dice: random.Random) -> SimulatedColdTier:
        """The cold tier of the log."""
        return SimulatedColdTier(self, dice)

    # --- a history ---------------------------------------------------------------------------------------------

    def play(self, steps: int) -> RunSummary:
        """Play ``steps`` random events, and then heal everything; raises :class:`Broken` with seed and story."""
        try:
            self.begin()
            while self.steps < steps:
                self.step()
            self._settle()
        except Exception as error:
            told = "\n".join(self.story)
            raise Broken(
                f"seed {self.seed}, step {self.steps}: {error}\n{told}\nseed {self.seed}: {error!r}"
            ) from error
        for machine in self.machines.values():
            self.counts["rewinds"] += sum(row.is_folder for row in machine.disk.scan(f"/node/{QUARANTINE}"))
        return RunSummary(self.seed, self.steps, self.counts, self.digest)

    def begin(self) -> None:
        """What comes first: nothing, so that things go wrong from the start."""

    def note(self, text: str) -> None:
        """Remember what happened, for who has to find out why."""
        line = f"{self.steps:5d} {self.time.now:8.3f} {text}"
        self.story.append(line)
        self.digest = zlib.crc32(line.encode(), self.digest)

    def step(self) -> None:
        """One thing happens."""
        self.steps += 1
        self._watch_starts()
        draw = self.dice.random()
        if draw < self.climate.trouble:
            self.climate.draw(self.dice)(self)
        elif draw < 0.66:
            self.turn()
        elif draw < 0.93:
            self.write()
        elif self.cold is not None and draw < 0.95:
            self.cold.round()
        elif draw < 0.97:
            self.consume()
        else:
            self.read()

    def _watch_starts(self) -> None:
        copies = (machine.running.copy for machine in self.ready())
        self.highest_start = max(
            [self.highest_start, *(copy.log.bounds().first for copy in copies if copy is not None)]
        )

    def lines(self, machine: Machine) -> list[FaultyStore]:
        """The stores as a machine reaches them."""
        return [machine.line] if self.cold is None else [machine.line, self.cold.lines[machine.name]]

    def ready(self) -> list[Machine]:
        """The machines whose nodes run and answer now."""
        return [machine for machine in self.machines.values() if self.network.answers(machine.name)]

    # --- nodes -------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """A node does the next thing; if all of them wait for something, the time passes."""
        now = self.time.now
        for machine in self.machines.values():
            if machine.node is None and machine.starts <= now and machine.name not in self.network.acting:
                self._start(machine)
                return
        ready = self.ready()
        awake = [machine for machine in ready if machine.wakes <= now]
        if awake:
            self._let_act(self.dice.choice(awake))
            return
        waiting = [machine.wakes for machine in ready]
        waiting += [max(machine.starts, machine.paused) for machine in self.machines.values() if machine not in ready]
        self.time.advance(min(max(0.001, min(waiting) - now), TERM))

    def _let_act(self, machine: Machine) -> None:
        machine.idle = False
        pause = self.within(machine, machine.running.step)
        self.time.advance(self.dice.random() * 0.01)
        if pause is not None:
            machine.wakes = self.time.now + (self.dice.random() * 0.25 if machine.idle else pause)
            self.observe(machine)

    def within(self, machine: Machine, work: Callable[[], R]) -> R | None:
        """Let a machine do something; None if it went down meanwhile."""
        self.network.acting.append(machine.name)
        try:
            return work()
        except BaseException:
            if not machine.disk.stopped:
                raise
            self.died(machine)
            return None
        finally:
            self.network.acting.pop()

    def observe(self, machine: Machine) -> None:
        """See what a node is now."""
        node = machine.running
        state = node.node_folder.state
        self.checker.take(TermsSeen(machine.name, state.seen, state.adopted, state.led))
        if state.adopted:
            self.recovering.discard(machine.name)
        seen = shown(machine.name, node)
        if seen is not None:
            self.checker.take(seen)
        self.counts["not ready" if seen is None else "shown"] += 1
        role = f"{node.condition} in term {state.seen}"
        if role != machine.role:
            self.note(f"{machine.name} is {role}, up to {node.report(Caller('', 0)).durable}")
            machine.role = role
            self._count(machine.name, state.led if node.is_primary else 0)
        if state.generation != machine.generation:
            self.counts["bootstraps"] += machine.generation > 0 or machine.name != "a"
            machine.generation = state.generation
            self.note(f"{machine.name} has copy {state.generation}")

    def _count(self, name: str, term: int) -> None:
        if term and term not in self.leaders:
            self.counts["failovers"] += bool(self.leaders) and self.leaders[max(self.leaders)] != name
            self.leaders[term] = name
        if term and self.leaders[term] != name:
            raise Broken(f"{name} leads in term {term}, and {self.leaders[term]} did")

    def _start(self, machine: Machine) -> None:
        seed = self.dice.getrandbits(64)
        machine.life += 1
        try:
            machine.node = self.within(machine, lambda: self.open_node(machine, seed))
        except StorageError as error:
            if not machine.founds:  # only who begins a log asks the store before it runs
                raise
            machine.disk.kill()
            machine.starts = self.time.now + self.dice.random()
            self.note(f"{machine.name} could not start: {error}")
            return
        if machine.node is not None:
            machine.founds, machine.wakes, machine.role = False, self.time.now, ""
            self.observe(machine)

    def open_node(self, machine: Machine, seed: int) -> Node:
        """The node of a machine, as it is started."""
        name, clock = machine.name, machine.clock
        options = NodeOptions(
            policy=Quorum(frozenset(NAMES)),
            poll_seconds=POLL,
            nodes={name: name for name in NAMES},
            url=name,
            automatic=True,
            cold=COLD if self.cold else None,
        )
        return Node(
            NodeFolder.open(
                "/node", name, env=Env(disk=machine.disk, clock=clock, chance=SeededChance(seed + 1)), background=False
            ),
            options,
            connect=lambda url: self._reach(name, url),
            lease=Lease(
                machine.line, "lease", f"{name} {name}", seconds=TERM, env=Env(clock=clock, chance=SeededChance(seed))
            ),
            create=machine.founds,
            open_cold=self.cold.opener(machine) if self.cold else None,
        )

    def _reach(self, source: str, target: str) -> Upstream:
        return SimulatedLink(self.network, source, target)

    def died(self, machine: Machine) -> None:
        """A machine has stopped in the middle of something."""
        self.crash(machine, self.dice.choice(list(CrashMode)))

    def crash(self, machine: Machine, mode: CrashMode) -> None:
        """End a node, or the power of its machine; it starts again after a while."""
        machine.disk.crash(mode)
        machine.node = None
        machine.starts = self.time.now + self.dice.random() ** 2 * 3 * TERM
        self.counts["crashes"] += 1
        self.note(f"{machine.name} died ({mode.value})")

    def _send_ahead(self, name: str) -> None:
        """Something is about to be synced."""
        self.counts["sent ahead"] += self.network.send_ahead(name)

    def _perhaps_stall(self, name: str) -> None:
        """Something has just become durable: perhaps the machine stands still before anybody is told."""
        if len(self.network.acting) > 2 or not self.network.chance(self.climate.stall):
            return
        self.counts["stalls"] += 1
        until = self.time.now + self.dice.random() * 2 * TERM
        self.note(f"{name} stalls until {until:.3f}, within {self.network.acting}")
        for _ in range(self.dice.randrange(60)):
            if self.time.now < until:
                self.step()
        self.time.now = max(self.time.now, until)
        self.note(f"{name} goes on")

    # --- clients -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """A writer asks a node that says it is the primary, or looks what became of what it asked."""
        writer = self.dice.choice(self.writers)
        asked = [(number, found) for number, found in writer.open.items() if found is not None]
        if asked and self.dice.random() < 0.6:
            number, found = asked[0]
            machine = self.machines[found.node]
            if machine.life != found.life or machine.node is None:
                writer.give_up(number)
                return
            if machine not in self.ready():
                return
            result = self.within(machine, lambda: writer.poll(number, found, self.time.now))
            if isinstance(result, Acknowledged):
                self.checker.take(result)
                self.counts["acknowledged"] += 1
                self.note(
                    f"{writer.name}:{number} acknowledged by {result.node} in term {result.term} at {result.first}"
                )
            elif result is not None:
                self.counts["timeouts"] += result.endswith("timed out")
                self._tell(result)
            return
        leading = [machine for machine in self.ready() if machine.running.condition == "leading"]
        if leading:
            machine = self.dice.choice(leading)
            said = self.within(
                machine, lambda: writer.submit(machine.name, machine.running, machine.life, self.time.now)
            )
            self._tell(said or "")

    def _tell(self, said: str) -> None:
        if said:
            self.note(said)

    def read(self) -> None:
        """Somebody reads the last records that a node shows."""
        ready = self.ready()
        if ready:
            machine = self.dice.choice(ready)
            last = self.dice.choice((4, 30, None) if self.cold else (4, 30))
            found = self.within(machine, lambda: read(machine.name, machine.running, last=last))
            if found is not None:
                self.looked(found)
                self.counts["reads"] += 1

    def looked(self, found: Read) -> None:
        """Somebody has read committed records."""
        self.checker.take(found)

    def consume(self) -> None:
        """A consumer uses its slot on a node that says it leads; then the slots there are checked."""
        leading = [machine for machine in self.ready() if machine.running.condition == "leading"]
        if not leading:
            return
        machine, consumer = self.dice.choice(leading), self.dice.choice(self.consumers)
        said = self.within(machine, lambda: consumer.act(machine.running, self.dice))
        consumer.is_servable &= consumer.moves < 2 and (consumer.moves == 0 or consumer.confirmed >= self.highest_start)
        if said is not None:
            self.counts["confirmed"] += " confirmed " in said
            self.note(said)
            self.within(machine, lambda: self.check_slots(machine))

    def check_slots(self, machine: Machine) -> None:
        """No slot of a node that leads is ahead of its consumer, and everything from there on can be read."""
        node = machine.running
        for consumer in self.consumers:
            consumer.check(node)
        if node.is_primary and (found := read_from_slots(machine.name, node)) is not None:
            self.checker.take(found)
            self.counts["slots read"] += 1

    def tiered(self, machine: Machine, done: Round) -> None:
        """A round of tiering has ended well."""
        if done.retired:
            raise Broken(f"{machine.name} cut {done.retired}: only what is committed may be in segments")

    # --- the end -----------------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        """Let nothing go wrong any more."""
        self.note("all is well from here on")
        self.climate = self.climate.calm()
        self.network.calm_down()
        for machine in self.machines.values():
            for line in self.lines(machine):
                line.heal()
                line.land_late()
            machine.disk.disarm()
            machine.paused = 0.0
            machine.starts = min(machine.starts, self.time.now)

    def _settle(self) -> None:
        """Let all be well, wait until nothing changes any more, and look at everything."""
        self.calm_down()
        for writer in self.writers:
            writer.is_last = True
        limit, quiet = self.steps + _SETTLING, self.time.now + 2 * TERM
        while self.steps < limit:
            self.steps += 1
            self.turn()
            if self.steps % 4 == 0:
                self.write()
            if self.cold is not None and self.steps % 32 == 0:
                self.cold.round()
            if self.steps % 8 == 0 and self.time.now > quiet and self._is_settled():
                break
        waiting = [f"{writer.name}:{number}" for writer in self.writers for number in writer.open]
        if waiting:
            raise Broken(f"{waiting} were never acknowledged, although all was well; nodes: {self._roles()}")
        if self.cold is not None:
            self.cold.check_whole()
        for machine in self.machines.values():
            if machine.running.is_primary:
                self.check_slots(machine)
        self.checker.take(self._final())

    def _is_settled(self) -> bool:
        roles = ["following"] * (len(self.names) - 1) + ["leading"]
        if any(writer.open for writer in self.writers) or self._roles() != roles:
            return False
        seen = [shown(name, machine.running) for name, machine in self.machines.items()]
        return None not in seen and len({(each.end, each.sealed) for each in seen if each is not None}) == 1

    def _roles(self) -> list[str]:
        return sorted(machine.condition for machine in self.machines.values())

    def _final(self) -> history.Final:
        logs, primaries, troubles, sealed, committed = {}, [], {}, [], -1
        for name, machine in self.machines.items():
            node = machine.node
            if node is None or not node.node_folder.state.generation:
                troubles[name] = "down" if node is None else "without a copy"
                continue
            bounds = node.reading().bounds()
            logs[name] = bounds.first, entries(node.reading(), bounds.first, bounds.next)
            if bounds.sealed:
                sealed.append(name)
            if node.is_primary:
                primaries.append(name)
                committed = node.report(Caller("", 0)).durable
            elif node.condition != "following":
                trouble = node.node_folder.state.trouble
                troubles[name] = node.condition if trouble is None else f"{node.condition}: {trouble.reason}"
        return history.Final(logs, tuple(primaries), troubles, committed, tuple(sealed))


def play(seed: int, steps: int = 500, climate: Climate | None = None, *, tiered: bool = False) -> RunSummary:
    """Tell the history of a seed, and check it."""
    return World(seed, climate, tiered=tiered).play(steps)
