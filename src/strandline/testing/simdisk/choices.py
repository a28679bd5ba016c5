"""The choices of a simulated crash: drawn from a seed, or enumerated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

R = TypeVar("R")


class Choices(Protocol):
    """A source of decisions."""

    def pick(self, count: int) -> int:
        """A number from 0 to below ``count``, which is at least 1."""


class Drawn:
    """Choices drawn from a seed: the same seed, the same choices."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def pick(self, count: int) -> int:
        """Any of them, at random."""
        return self._random.randrange(count) if count > 1 else 0


class _Scripted:
    """Scripted choices, then the first of each; counts them."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.made: list[tuple[int, int]] = []

    def pick(self, count: int) -> int:
        chosen = self._script[len(self.made)] if len(self.made) < len(self._script) else 0
        self.made.append((chosen, count))
        return chosen


def every(run: Callable[[Choices], R]) -> Iterator[R]:
    """The results of ``run`` for all combinations of its choices; it must be deterministic.

    >>> list(every(lambda choices: (choices.pick(2), choices.pick(3))))
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    """
    script: list[int] = []
    while True:
        choices = _Scripted(script)
        yield run(choices)
        made = choices.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        script = [chosen for chosen, _ in made]
        script[-1] += 1
