"""A cluster without a lease: an operator promotes nodes by force, so that several believe that they lead.

A forced promotion loses the records that only other nodes have, and the former primary goes on until it hears of the
later term. The judge is about the primary of the latest term, the head of the cluster: what it holds when it begins to
lead, and what it has in either tier after a round of tiering, stays readable there; former primaries, which may stand
still in the middle of any request to the store, take nothing of that away.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Final

from strandline.errors import Fenced, NotReady, StrandlineError, TransientStorageError
from strandline.model.records import record_batch
from strandline.model.segments import COLD_FILE
from strandline.node.messages import Caller
from strandline.node.node import Node
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.storage.env import Env
from strandline.testing.clock import SeededChance
from strandline.testing.faulty import Call
from strandline.testing.simdisk import CrashMode
from strandline.tier.claim import CLAIM_CODEC, CLAIM_FILE
from strandline.tier.copy.rounds import Round
from tests.cluster.clients import entries
from tests.cluster.cold_tier import COLD, SimulatedColdTier
from tests.cluster.consumers import ClientConsumer, live_slots
from tests.cluster.faults import Climate
from tests.cluster.history import Broken, HistoryEntry, Read
from tests.cluster.machine import Machine
from tests.cluster.simulated_cluster import NAMES, POLL, RunSummary, World

_UPSTREAM: Final = "primary"
"""The address that the operator points at the head."""
_SETTLING: Final = 1500

Place = tuple[int, int]
"""Offset and term of a record: no two records have both in common."""


class OvertakenColdTier(SimulatedColdTier):
    """A cold tier whose tierers are often overtaken in the middle of a request: another node is promoted and tiers."""

    world: OperatedWorld

    def rate(self, call: Call) -> float:
        """Above all at the two cells that decide who may delete: between a check there and what depends on it."""
        return self.switches * (5 if call.path.endswith((CLAIM_FILE, COLD_FILE)) else 1)

    def is_cutting(self) -> bool:
        """Whether a tierer has noted segments that it deletes, and some of them are still there."""
        paths = [info.path for info in self._store.list("")]
        cells = [path for path in paths if path.endswith(CLAIM_FILE)]
        noted = [each for path in cells for each in CLAIM_CODEC.decode(self._store.get(path).data, path).value.retired]
        return any(str(segment) in path for segment in noted for path in paths)

    def switch(self, name: str) -> None:
        """Let the operator replace the primary that stands still here, or let anything else happen."""
        world = self.world
        if world.dice.random() < 0.5:
            super().switch(name)
            return
        others = [machine for machine in world.ready() if machine.name != name and machine.name not in self._tiering]
        if not others:
            return
        world.counts["overtaken"] += 1
        world.overtake(world.dice.choice(others))


class OperatedWorld(World):
    """Three machines, and an operator who replaces the primary by force, whether it still runs or not."""

    def __init__(self, seed: int, *, retention: str | None = None) -> None:
        """Everything that is drawn is drawn from this seed; the retention of segments, too, unless it is given."""
        self.head = "a"
        """The primary of the latest term, which the operator points all others at."""
        self.head_term = 1
        self.held = 0
        """The offset from which on the head has to have everything that it ever had."""
        self._appended = 0
        self._records: dict[Place, tuple[HistoryEntry, Place | None]] = {}
        """Each record, and the place of the one before it in the log of its primary."""
        self._retention = retention
        super().__init__(seed, Climate.of_operators(_promote_any, _repair), tiered=True)
        self.consumers.append(ClientConsumer("late"))

    def new_cold(self, dice: random.Random) -> SimulatedColdTier:
        """The cold tier of the log."""
        cold = OvertakenColdTier(self, dice)
        retention = self._retention or dice.choice(("forever", "bytes:4KiB", "consumed"))
        cold.settings = replace(cold.settings, retention=retention)
        return cold

    def open_node(self, machine: Machine, seed: int) -> Node:
        """The node of a machine: it leads if the operator wants it to, and nothing speaks against that."""
        try:
            return self._opened(machine, seed, lead=machine.name == self.head)
        except (Fenced, NotReady) as error:
            self.note(f"{machine.name} does not lead: {error}")
            return self._opened(machine, seed, lead=False)

    def _opened(self, machine: Machine, seed: int, *, lead: bool) -> Node:
        name, clock = machine.name, machine.clock
        return Node(
            NodeFolder.open(
                "/node", name, env=Env(disk=machine.disk, clock=clock, chance=SeededChance(seed + 1)), background=False
            ),
            NodeOptions(poll_seconds=POLL, nodes={name: name for name in NAMES}, cold=COLD),
            connect=lambda url: self._reach(name, self.head if url == _UPSTREAM else url),
            upstream=_UPSTREAM,
            create=machine.founds,
            lead=lead,
            open_cold=None if self.cold is None else self.cold.opener(machine),
        )

    def begin(self) -> None:
        """Let all nodes have a copy first, since none without one can be promoted."""
        while self._roles() != ["following", "following", "leading"]:
            self.turn()

    def step(self) -> None:
        """One thing happens."""
        self.steps += 1
        draw = self.dice.random()
        if draw < self.climate.trouble:
            self.climate.draw(self.dice)(self)
        elif draw < 0.6:
            self.turn()
        elif draw < 0.8:
            self.write()
        elif draw < 0.88 and self.cold is not None:
            self.cold.round()
        elif draw < 0.94:
            self.consume()
        else:
            self.judge()

    def observe(self, machine: Machine) -> None:
        """Note what a node is now; what it shows may be less than before, since the operator gives records up."""
        role = f"{machine.running.condition} in term {machine.running.node_folder.state.seen}"
        if role != machine.role:
            machine.role = role
            self.note(f"{machine.name} is {role}")

    # --- the operator ------------------------------------------------------------------------------------------

    def promote(self, machine: Machine) -> bool:
        """Cut a node off from all others, and let it lead by force; whether it is the head now."""
        self.network.cuts.update(frozenset((machine.name, other)) for other in self.machines if other != machine.name)
        told = self.dice.random() < 0.9  # otherwise it may lead in a term that is not the latest

        def work() -> int:
            node = machine.running
            if told:
                node.report(Caller(self.head, self.head_term))
            return node.promote(force=True).term

        try:
            term = self.within(machine, work)
        except StrandlineError as error:
            self.note(f"{machine.name} was not promoted: {type(error).__name__} {error}")
            return False
        self.note(f"{machine.name} was promoted by force: term {term}")
        if term is None or term <= self.head_term:
            return False
        self.head, self.head_term, self.held = machine.name, term, machine.running.log.bounds().first
        self.counts["promotions"] += 1
        return True

    def overtake(self, machine: Machine) -> None:
        """Promote a node; it appends, tiers and trims at once, and a consumer reads it from its beginning."""
        if not self.promote(machine):
            return
        self.forget_replicas(machine)
        for _ in range(self.dice.randrange(3)):
            if machine.node is not None:
                self.append(machine)
        for _ in range(self.dice.randrange(1, 3)):
            if self.cold is not None and machine in self.ready():
                self.cold.round_of(machine)
            if machine in self.ready():
                self.start_over(machine)

    def start_over(self, machine: Machine) -> None:
        """A consumer reads a new primary from the beginning of its cold tier: from there on nothing may be deleted.

        But for what a former primary had decided to delete before, since its records are others.
        """
        first = self.within(machine, lambda: self.consumers[-1].start_over(machine.running))
        self.note(f"{self.consumers[-1].name} starts over at {first} on {machine.name}")
        if first is not None and machine.name == self.head and isinstance(self.cold, OvertakenColdTier):
            self.held = self.held if self.cold.is_cutting() else min(self.held, first)

    def forget_replicas(self, machine: Machine) -> None:
        """Let a primary retain nothing for nodes that are cut off."""
        primary = machine.running.primary
        for name in list(primary.registry.replicas):
            self.within(machine, partial(primary.unregister, Caller(name, 0)))

    def repair(self) -> None:
        """Restart nodes that lead and should not, let the head lead, and rebuild copies that diverged."""
        self.network.cuts.clear()
        for machine in self.ready():
            node = machine.running
            if machine.name == self.head and not node.is_primary:
                self.promote(machine)
                self.network.cuts.clear()
            elif machine.name != self.head and node.is_primary:
                self.crash(machine, CrashMode.KILL)
                machine.starts = self.time.now
            elif node.condition in ("gap", "diverged"):
                self.within(machine, node.rebootstrap)

    # --- clients -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Somebody appends at a node that says it leads: at a former primary, too."""
        leading = [machine for machine in self.ready() if machine.running.condition == "leading"]
        if leading:
            self.append(self.dice.choice(leading))

    def append(self, machine: Machine) -> None:
        """Append a few records at a primary."""
        self.within(machine, lambda: self._append(machine.running))

    def _append(self, node: Node) -> None:
        count = 1 + self.dice.randrange(3)
        self._appended += 1
        try:
            primary = node.primary
            log, term = primary.log, primary.term
            before = _last_place(node)
            new = [HistoryEntry(node.name, self._appended, part, count) for part in range(count)]
            for offset, entry in enumerate(new, log.bounds().next):
                self._records[offset, term] = entry, before
                before = offset, term
            batch = record_batch(
                timestamps=[0] * count, ops=[0] * count, keys=[None] * count, values=[entry.encode() for entry in new]
            )
            primary.append(batch, timeout=0.0)
        except StrandlineError as error:
            self.note(f"{node.name} appended nothing: {type(error).__name__} {error}")

    def consume(self) -> None:
        """Consumers use their slots on the head, or on a node that believes that it leads."""
        leading = [machine for machine in self.ready() if machine.running.condition == "leading"]
        if not leading:
            return
        machine = self.dice.choice(leading)
        for consumer in self.consumers:
            if machine in self.ready():
                self.consume_on(machine, consumer)

    def consume_on(self, machine: Machine, consumer: ClientConsumer) -> None:
        """A consumer uses its slot on a node."""
        said = self.within(machine, lambda: consumer.act(machine.running, self.dice))
        if said is not None:
            self.note(said)
            self.within(machine, lambda: consumer.check(machine.running))

    def tiered(self, machine: Machine, done: Round) -> None:
        """A round of tiering has ended well: from here on the head needs all that it has in either tier."""
        del done
        node = machine.running
        if machine.name == self.head and node.is_primary and node.primary.term == self.head_term:
            self.held = min(self.held, node.reading().bounds().first)
            self.counts["whole"] += 1

    def looked(self, found: Read) -> None:
        """Somebody has read records: others may take their place, since the operator gives records up."""

    # --- the judge ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """The head still has what it needs: all of it, or what its consumers need if segments expire."""
        machine = self.machines[self.head]
        if machine not in self.ready() or not machine.running.is_primary:
            return
        self.within(machine, lambda: self._judge(machine.running))

    def _judge(self, node: Node) -> None:
        try:
            seen = node.reading()
            end = seen.bounds().next
            first = self._needed(node)
            found = None if first is None else entries(seen, first, end)
        except (NotReady, TransientStorageError):
            return
        except StrandlineError as error:
            raise Broken(f"{node.name} leads, and has lost records: {type(error).__name__} {error}") from error
        if first is not None and found is not None:
            self.counts["judged"] += 1
            if list(found) != self._past(node)[first:]:
                raise Broken(f"{node.name} leads, and has other records than before from offset {first} on")

    def _needed(self, node: Node) -> int | None:
        if self.cold is not None and self.cold.settings.retention == "forever":
            return self.held
        return min((slot.position for slot in live_slots(node) if slot.position >= self.held), default=None)

    def _past(self, node: Node) -> list[HistoryEntry]:
        """Every record that the log of a node ever had below its end."""
        found: list[HistoryEntry] = []
        place = _last_place(node)
        while place is not None:
            entry, place = self._records[place]
            found.append(entry)
        return found[::-1]

    def _settle(self) -> None:
        """Let all be well, and the operator restart what is stale, until all follow the head."""
        self.calm_down()
        limit = self.steps + _SETTLING
        while self.steps < limit and self._roles() != ["following", "following", "leading"]:
            self.steps += 1
            self.turn()
            if self.steps % 16 == 0:
                self.repair()
        if self.steps >= limit:
            raise Broken(f"nodes are {self._roles()} although all is well and the operator helps")
        if self.cold is not None:
            self.cold.switches = 0.0
            self.cold.round()
        self.judge()


def _promote_any(world: World) -> None:
    """The operator promotes one of the nodes that do not lead the log now."""
    if isinstance(world, OperatedWorld):
        others = [machine for machine in world.ready() if machine.name != world.head]
        if others:
            world.promote(world.dice.choice(others))


def _repair(world: World) -> None:
    """The operator lets all nodes follow the head."""
    if isinstance(world, OperatedWorld):
        world.repair()


def _last_place(node: Node) -> Place | None:
    """The place of the last record of a node's log, trimmed or not; None if it never had any."""
    log = node.log
    end = log.bounds().next
    term = log.term_at(end - 1) if end else None
    if end and term is None:
        raise AssertionError(f"{node.name} does not know the term of its last record")
    return None if term is None else (end - 1, term)


def operate(seed: int, steps: int = 300, *, retention: str | None = None) -> RunSummary:
    """Tell the history of a seed, and judge it."""
    return OperatedWorld(seed, retention=retention).play(steps)


__all__ = ["OperatedWorld", "operate"]
