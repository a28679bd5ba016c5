"""A cluster whose members and commit policy change all the time, while nodes come and go.

Four machines, of which three vote at first. An operator adds and removes nodes, changes the voters, and takes changes
back, at whichever node says that it leads. In the end he makes voters of all four.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from strandline.errors import InvalidInput, StrandlineError
from strandline.model.node import Membership
from strandline.node.members.rules import AddNode, CancelChange, Change, RemoveNode, SetPolicy, shown, urls
from tests.cluster import faults
from tests.cluster.faults import Climate
from tests.cluster.history import Broken
from tests.cluster.machine import Machine
from tests.cluster.simulated_cluster import RunSummary, World

_ALL: Final = ("a", "b", "c", "d")
_PATIENCE: Final = 8
"""Steps between two looks of the operator, in the end."""


class ReshapedWorld(World):
    """Four machines, and an operator who changes the members."""

    names = _ALL

    def __init__(self, seed: int, climate: Climate | None = None) -> None:
        """Everything that is drawn is drawn from this seed."""
        self.records: dict[tuple[int, int], Membership] = {}
        """Each record that a node ever had, by its version."""
        self._is_ending = False
        super().__init__(seed, climate or reshaped(random.Random(seed)))

    def change(self, machine: Machine, what: Change) -> None:
        """Ask a node that leads for a change."""
        try:
            said = self.within(machine, lambda: shown(machine.running.primary.change_members(what)))
            self.counts["changes"] += 1
        except (StrandlineError, InvalidInput) as error:
            said = f"{type(error).__name__}: {error}"
        self.note(f"{machine.name} was asked for {what}: {said}")

    def observe(self, machine: Machine) -> None:
        """See what a node is now, and which members it knows: no two primaries make one record."""
        super().observe(machine)
        found = machine.running.node_folder.state.membership
        if found is None:
            return
        is_new = found.version not in self.records
        known = self.records.setdefault(found.version, found)
        if known != found:
            raise Broken(f"{machine.name} has {shown(found)}, and another node {shown(known)}, of one version")
        if is_new:
            self.counts["complete" if found.former is None else "pending"] += 1
            self.note(f"{machine.name} has {shown(found)} of term {found.term}")

    def calm_down(self) -> None:
        """Let nothing go wrong any more, and the operator come to an end."""
        super().calm_down()
        self._is_ending = True

    def turn(self) -> None:
        """A node does the next thing; in the end the operator looks now and then."""
        super().turn()
        if self._is_ending and self.steps % _PATIENCE == 0:
            self._come_to_an_end()

    def _come_to_an_end(self) -> None:
        for machine in self.ready():
            if not machine.running.is_primary:
                continue
            known = machine.running.primary.membership.known
            missing = [] if known is None else [name for name in _ALL if urls(known).get(name) != name]
            wanted = f"quorum({','.join(_ALL)})"
            if known is None:  # all may be there by the settings: then adding one changes nothing
                for name in _ALL:
                    self.change(machine, AddNode(name, name))
                self.change(machine, SetPolicy(wanted))
            elif missing:
                self.change(machine, AddNode(missing[0], missing[0]))
            elif known.former is None and known.members.policy != wanted:
                self.change(machine, SetPolicy(wanted))

    def _is_settled(self) -> bool:
        found = [machine.node and machine.node.node_folder.state.membership for machine in self.machines.values()]
        known = found[0]
        if known is None or any(each != known for each in found) or known.former is not None:
            return False
        return len(known.members.nodes) == len(_ALL) and super()._is_settled()


def _change(world: World) -> None:
    """The operator changes something."""
    if not isinstance(world, ReshapedWorld):
        raise TypeError("only this world has an operator for its members")
    leading = [machine for machine in world.ready() if machine.running.is_primary]
    if not leading:
        return
    machine, dice = world.dice.choice(leading), world.dice
    draw = dice.random()
    known = machine.running.primary.membership.known
    what: Change = CancelChange(*((0, 0) if known is None else known.version))
    if draw < 0.25:
        name = dice.choice(_ALL)
        what = AddNode(name, name)
    elif draw < 0.45:
        what = RemoveNode(dice.choice(_ALL))
    elif draw < 0.9:
        others = [name for name in _ALL if name != machine.name]
        voters = [machine.name, *dice.sample(others, dice.randrange(1, len(others) + 1))]
        what = SetPolicy(f"quorum({','.join(sorted(voters))})")
    world.change(machine, what)


def _split(world: World) -> None:
    """Two halves cannot reach each other any more."""
    half = set(world.dice.sample(_ALL, 2))
    world.network.cuts.update(frozenset((one, other)) for one in half for other in _ALL if other not in half)
    world.note(f"{sorted(half)} are cut off from the others")


def reshaped(dice: random.Random) -> Climate:
    """Anything may go wrong but the loss of a disk: with two voters, one of them may have all that was committed."""
    drawn = Climate.drawn(dice)
    kinds = {kind: weight for kind, weight in drawn.happenings.items() if kind is not faults._wipe}
    total = sum(kinds.values())
    return replace(drawn, happenings={**kinds, _change: total / 2}, trouble=max(drawn.trouble, 0.05))


def of_changes() -> Climate:
    """Nodes come and go, the cluster falls in halves, and the members change; everything else works well."""
    calm = Climate.of_elections()
    kinds: dict[faults.Happening, float] = {
        faults._kill: 1.5, faults._cut_power: 0.5, faults._pause: 0.5, faults._mend: 2.0, _split: 2.0, _change: 3.0
    }  # fmt: skip
    return replace(calm, happenings=kinds, trouble=0.1)


def reshape(seed: int, steps: int = 500, climate: Climate | None = None) -> RunSummary:
    """Tell the history of a seed, and check it."""
    return ReshapedWorld(seed, climate).play(steps)
