"""A small breadth-first explorer: visits every reachable state of a model once."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Move(Generic[S]):
    """A step to another state. A fair one happens by itself if nothing fails and no other move is made."""

    label: str
    state: S
    fair: bool = False


class Counterexample(AssertionError):
    """A promise is broken: ``trace`` is a shortest path there, and ``broken`` says what was found at its end."""

    def __init__(self, broken: str, trace: list[str]) -> None:
        lines = [f"  {number:3}. {label}" for number, label in enumerate(trace, 1)]
        super().__init__("\n".join([broken, f"after {len(trace)} steps:", *lines]))
        self.broken, self.trace = broken, trace


class TooManyStates(RuntimeError):
    """The model has more states than its test allows: nothing is proved. Choose smaller bounds."""


@dataclass(frozen=True, slots=True)
class Explored:
    """Counts of an exploration: states, moves, the longest shortest path, and states without a move."""

    states: int
    moves: int
    depth: int
    settled: int


@dataclass(frozen=True, slots=True)
class Model(Generic[S]):
    """What is explored.

    ``fingerprint`` is equal for two states exactly if nothing that follows can tell them apart. ``invariant`` says
    what is broken in a state, or None; ``final`` does so for states that no fair move leaves: there everything that
    was due must have been done. From every state fair moves must lead to one of those.
    """

    initial: S
    moves: Callable[[S], Iterable[Move[S]]]
    fingerprint: Callable[[S], Hashable]
    invariant: Callable[[S], str | None]
    final: Callable[[S], str | None]


def explore(model: Model[S], *, most: int) -> Explored:
    """Check every reachable state; ``Counterexample`` with a shortest trace, ``TooManyStates`` beyond ``most``.

    Deterministic if the model's moves are: the same states in the same order, the same trace.
    """
    return _Exploration(model, most).run()


class _Exploration(Generic[S]):
    def __init__(self, model: Model[S], most: int) -> None:
        self.model = model
        self.most = most
        self.numbers: dict[Hashable, int] = {}
        self.parents = array("q")
        self.labels: list[str] = []
        self.depths = array("q")
        self.frontier: deque[tuple[int, S]] = deque()
        self.fair_from, self.fair_to = array("q"), array("q")
        self.settled = bytearray()
        self.moves = 0

    def run(self) -> Explored:
        self._reach(self.model.initial, -1, "")
        while self.frontier:
            self._expand(*self.frontier.popleft())
        self._all_settle()
        return Explored(len(self.numbers), self.moves, max(self.depths), sum(self.settled))

    def _reach(self, state: S, parent: int, label: str) -> int:
        key = self.model.fingerprint(state)
        known = self.numbers.get(key)
        if known is not None:
            return known
        number = self.numbers[key] = len(self.numbers)
        self.parents.append(parent)
        self.labels.append(label)
        self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        self.settled.append(0)
        self._judge(number, self.model.invariant(state))
        if number >= self.most:
            raise TooManyStates(f"There are more than {self.most} states, {self.depths[number]} steps deep so far.")
        self.frontier.append((number, state))
        return number

    def _expand(self, number: int, state: S) -> None:
        leaves = False
        for move in self.model.moves(state):
            self.moves += 1
            reached = self._reach(move.state, number, move.label)
            if move.fair and reached != number:
                leaves = True
                self.fair_from.append(number)
                self.fair_to.append(reached)
        if not leaves:
            self.settled[number] = 1
            self._judge(number, self.model.final(state))

    def _all_settle(self) -> None:
        """Whether fair moves lead from each state to a settled one: back from those, along the fair moves."""
        before: list[list[int]] = [[] for _ in self.settled]
        for source, target in zip(self.fair_from, self.fair_to, strict=True):
            before[target].append(source)
        reaches = bytearray(self.settled)
        waiting = [number for number, settled in enumerate(self.settled) if settled]
        while waiting:
            for number in before[waiting.pop()]:
                if not reaches[number]:
                    reaches[number] = 1
                    waiting.append(number)
        stuck = reaches.find(0)
        if stuck >= 0:
            self._judge(stuck, "From here it goes on for ever, and never settles.")

    def _judge(self, number: int, broken: str | None) -> None:
        if broken is None:
            return
        trace: list[str] = []
        while self.parents[number] >= 0:
            trace.append(self.labels[number])
            number = self.parents[number]
        raise Counterexample(broken, trace[::-1])
