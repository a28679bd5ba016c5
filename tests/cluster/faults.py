"""What goes wrong in a simulated cluster: how often, drawn from a seed, and how."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from strandline.errors import StorageError, StrandlineError
from strandline.testing.faulty import CALM, Faults
from strandline.testing.simdisk import POWER, CrashMode, Moment
from tests.cluster.clients import read
from tests.cluster.consumers import live_slots
from tests.cluster.history import Wiped
from tests.cluster.network import FINE, Weather

if TYPE_CHECKING:
    from tests.cluster.machine import Machine
    from tests.cluster.simulated_cluster import World


def _kill(world: World) -> None:
    """A process ends."""
    if machine := _any(world):
        world.crash(machine, CrashMode.KILL)


def _cut_power(world: World) -> None:
    """A machine loses its power."""
    if machine := _any(world):
        world.crash(machine, world.dice.choice(POWER))


def _stop(world: World) -> None:
    """A machine stops at one of the next things that it does to its disk, before, in or after it."""
    machine = _any(world)
    if machine and not machine.disk.is_armed:
        moment = world.dice.choice(_MOMENTS)
        machine.disk.stop(len(machine.disk.calls) + world.dice.randrange(30), moment=moment)


def _fail(world: World) -> None:
    """One of the next things that a node does to its disk fails."""
    machine = _any(world)
    if machine and not machine.disk.is_armed:
        error = StorageError("The disk refused it.")
        machine.disk.interrupt(len(machine.disk.calls) + world.dice.randrange(30), error)


def _pause(world: World) -> None:
    """A machine stands still, or is suspended, perhaps for longer than a lease."""
    if machine := _any(world):
        seconds = world.dice.random() ** 2 * 5
        machine.paused = world.time.now + seconds
        machine.clock.missed += seconds * world.dice.choice((0, 1))
        world.note(f"{machine.name} is paused for {seconds:.3f} s")


def _cut(world: World) -> None:
    """Two machines cannot reach each other any more, or one cannot reach any."""
    name, other = world.dice.sample(list(world.machines), 2)
    others = [other] if world.dice.random() < 0.5 else [each for each in world.machines if each != name]
    world.network.cuts.update(frozenset((name, each)) for each in others)
    world.note(f"{name} is cut off from {others}")


def _mend(world: World) -> None:
    """All machines reach each other and the store again."""
    world.network.cuts.clear()
    for machine in world.machines.values():
        for line in world.lines(machine):
            line.turn_up()
    world.note("the network is mended")


def _blind(world: World) -> None:
    """A machine cannot reach the store of the lease any more, or can again."""
    if machine := _any(world):
        for line in world.lines(machine):
            if world.dice.random() < 0.5:
                line.turn_down()
            else:
                line.turn_up()


def _trim(world: World) -> None:
    """What was read is forgotten on a primary, whether replicas still need it or not."""
    leading = [machine for machine in world.ready() if machine.running.is_primary]
    if not leading:
        return
    machine = world.dice.choice(leading)
    primary = machine.running.primary
    upto = primary.committed - world.dice.randrange(8)
    found = read(machine.name, machine.running, upto=upto)
    if found is None or upto <= found.first:
        return
    world.looked(found)  # nobody can look at it later

    def trim() -> int:
        if world.cold is None and world.dice.random() < 0.5:
            needed = {slot.name for slot in live_slots(machine.running) if slot.position >= upto}
            for consumer in world.consumers:
                consumer.is_servable &= consumer.name in needed
            return primary.log.trim(upto, beyond_slots=True)
        return primary.trim(upto)

    world.note(f"{machine.name} trimmed up to {_tried(world, machine, trim)} of {upto}")


def _start_over(world: World) -> None:
    """A consumer begins again with everything that a primary retains."""
    leading = [machine for machine in world.ready() if machine.running.is_primary]
    if leading:
        machine, consumer = world.dice.choice(leading), world.dice.choice(world.consumers)
        at = _tried(world, machine, lambda: consumer.start_over(machine.running))
        consumer.is_servable = False
        world.note(f"{consumer.name} starts over at {at} on {machine.name}")


def _rebuild(world: World) -> None:
    """Somebody asks a replica to build its copy again."""
    machine = _any(world)
    if machine and not machine.running.is_primary and machine.running.condition == "following":
        _tried(world, machine, machine.running.replica.rebootstrap)
        world.note(f"{machine.name} is asked to build its copy again")


def _jump(world: World) -> None:
    """A wall clock jumps."""
    if machine := _any(world):
        machine.clock.skew += world.dice.uniform(-4000, 4000)


def _late(world: World) -> None:
    """A call arrives late."""
    said = world.network.deliver_late()
    if said:
        world.note(said)


def _wipe(world: World) -> None:
    """A machine loses its disk: one at a time, since two of three may have been all that had a record."""
    machine = _any(world)
    states = [each.running.node_folder.state.adopted for each in world.ready()]
    if not machine or world.recovering or len(states) < len(world.machines) or not all(states):
        return
    world.recovering.add(machine.name)
    world.crash(machine, CrashMode.KILL)
    machine.disk, machine.generation = world.new_disk(machine.name), 0
    world.checker.take(Wiped(machine.name))
    world.counts["wipes"] += 1
    world.note(f"{machine.name} lost its disk")


def _promote(world: World) -> None:
    """Somebody asks a replica to become the primary."""
    machine = _any(world)
    if machine and machine.running.condition == "following":
        said = _tried(world, machine, lambda: machine.running.promote().term)
        world.note(f"{machine.name} was asked to lead: {said}")
        if machine.node is not None:
            world.observe(machine)


def _any(world: World) -> Machine | None:
    ready = world.ready()
    return world.dice.choice(ready) if ready else None


def _tried(world: World, machine: Machine, work: Callable[[], object]) -> object:
    try:
        return world.within(machine, work)
    except StrandlineError as error:
        return f"{type(error).__name__}: {error}"


_MOMENTS: Final[tuple[Moment, ...]] = ("before", "half", "unsynced", "after")

Happening = Callable[["World"], None]

_HAPPENINGS: Final[dict[Happening, float]] = {
    _kill: 1.0,
    _cut_power: 1.0,
    _stop: 1.5,
    _fail: 0.5,
    _pause: 1.0,
    _cut: 1.0,
    _mend: 1.5,
    _blind: 0.7,
    _trim: 0.7,
    _rebuild: 0.5,
    _jump: 0.3,
    _late: 2.0,
    _wipe: 0.3,
    _promote: 0.3,
}


@dataclass(frozen=True, slots=True)
class Climate:
    """What goes wrong in a history, and how often."""

    weather: Weather
    store: Faults
    happenings: dict[Happening, float]
    """What may happen between two steps, with weights."""
    trouble: float
    """How likely that is, per step."""
    stall: float
    """How likely a machine stands still just when something has become durable on it."""

    @classmethod
    def drawn(cls, dice: random.Random) -> Climate:
        """Each history leaves out some kinds of trouble, so that the others have room."""

        def rate(highest: float, often: float = 0.6) -> float:
            return highest * dice.random() ** 2 if dice.random() < often else 0.0

        weather = Weather(rate(0.1), rate(0.1), rate(0.1), rate(0.05), rate(0.7), rate(1.0))
        store = Faults(rate(0.1), rate(0.1), rate(0.1), rate(0.05), rate(0.5, 0.3))
        kinds = {kind: weight for kind, weight in _HAPPENINGS.items() if dice.random() < 0.7}
        return cls(weather, store, {**kinds, _mend: 1.0}, 0.02 + rate(0.1, 1.0), rate(0.03))

    @classmethod
    def of_elections(cls) -> Climate:
        """Nodes come and go, and with them who leads; everything else works well."""
        kinds: dict[Happening, float] = {_kill: 0.5, _cut_power: 0.5, _pause: 1.0, _cut: 2.0, _mend: 3.0}
        return cls(Weather(held=0.5, ahead=0.5), CALM, kinds, 0.05, 0.0)

    @classmethod
    def of_tiers(cls) -> Climate:
        """Nodes come and go, and whoever leads trims what it may."""
        kinds = {**cls.of_elections().happenings, _kill: 2.0, _trim: 4.0, _promote: 2.0}
        return replace(cls.of_elections(), happenings=kinds, trouble=0.12)

    @classmethod
    def of_restarts(cls) -> Climate:
        """As :meth:`of_tiers`, with consumers that start over again and again."""
        return replace(cls.of_tiers(), happenings={**cls.of_tiers().happenings, _start_over: 4.0})

    @classmethod
    def of_operators(cls, promote: Happening, repair: Happening) -> Climate:
        """Nodes come and go, and somebody promotes others by force, or repairs the cluster."""
        kinds: dict[Happening, float] = {
            _kill: 0.5, _pause: 0.5, _cut: 1.0, _mend: 1.0, _trim: 1.0, promote: 1.0, repair: 1.0
        }  # fmt: skip
        return cls(FINE, CALM, kinds, 0.06, 0.0)

    @classmethod
    def of_pauses(cls) -> Climate:
        """Machines stand still, often for longer than a lease; everything else works well."""
        return cls(FINE, CALM, {_pause: 1.0}, 0.03, 0.01)

    def draw(self, dice: random.Random) -> Happening:
        """What goes wrong now."""
        return dice.choices(list(self.happenings), list(self.happenings.values()))[0]

    def calm(self) -> Climate:
        """Nothing goes wrong any more."""
        return replace(self, weather=FINE, store=CALM, trouble=0.0, stall=0.0)
