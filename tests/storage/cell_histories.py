"""Seeded histories of a cell: writers race, lose answers, crash and restart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from strandline.errors import Contended, OutcomeUnknown, TransientStorageError
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.interleave import Interleaver
from tests.storage.cell_contract import JsonCodec

BAD_LINE: Final = Faults(before=0.06, after=0.1, late=0.06, throttled=0.03, latency=0.1)
"""About every fourth operation goes wrong."""

DEATH: Final = 0.02
"""How likely a writer dies at an operation, half of the time when it was done."""

OpenCell = Callable[[ObjectStore], StoreCell[str]]


@dataclass(slots=True)
class History:
    """Counts of what happened, so that a test can assert that something did."""

    final: str = ""
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    """Each change that was acknowledged, with the value that its writer was given."""
    given_up: list[str] = field(default_factory=list)
    lost: int = 0
    late: int = 0
    conflicts: int = 0
    deaths: int = 0


def open_store_cell(store: ObjectStore) -> StoreCell[str]:
    """The cell that :func:`play` creates, as the package itself opens it."""
    return StoreCell(store, "cell", JsonCodec[str](), env=Env(clock=ManualClock(), chance=SeededChance(3)))


def play(
    seed: int,
    open_cell: OpenCell = open_store_cell,
    *,
    faults: Faults = BAD_LINE,
    place: ObjectStore | None = None,
) -> History:
    """Let two to four writers append their changes to one cell, and check the history that they made.

    Raises ``AssertionError``, naming the seed, unless every acknowledged change is in the cell exactly once,
    every other at most once, each writer's in its order, and every value that was handed out is a beginning of
    the final one. Writers repeat what stayed unknown, and come back after dying, under the same operation. The cell
    is made in ``place``, an empty store, if one is given.
    """
    chance = random.Random(seed)
    order = Interleaver(chance.getrandbits(64))
    place, history = place or PlainStore(), History()
    StoreCell(place, "cell", JsonCodec[str]()).create(OpId(UUID(int=0)), "")
    lines: list[FaultyStore] = []
    tasks: list[Callable[[], None]] = []
    for name in "abcd"[: chance.randint(2, 4)]:
        line = FaultyStore(place, seed=chance.getrandbits(64), faults=faults)
        line.hook(_meet(order, random.Random(chance.getrandbits(64)), history))
        lines.append(line)
        changes, ids = chance.randint(1, 4), SeededChance(chance.getrandbits(64))
        tasks.append(_writer(name, line, open_cell, ids, changes=changes, history=history))
    order.run(tasks)
    for line in lines:
        line.land_late()
        history.lost += sum(row.outcome == "after" and row.name == "put_if" for row in line.log)
        history.late += sum(row.outcome == "late" and row.name == "put_if" for row in line.log)
        history.conflicts += sum(row.outcome == "refused" and row.name == "put_if" for row in line.log)
    history.final = open_cell(place).read().value
    check(history, seed)
    return history


def _meet(order: Interleaver, chance: random.Random, history: History) -> Callable[[Call], None]:
    def hook(call: Call) -> None:
        order.point()
        if chance.random() < DEATH / 2:
            history.deaths += 1
            raise Crash(f"at {call}")

    return hook


def _writer(
    name: str, line: FaultyStore, open_cell: OpenCell, chance: SeededChance, *, changes: int, history: History
) -> Callable[[], None]:
    def append(change: str) -> Callable[[str], str]:
        return lambda text: f"{text} {change}"

    def work() -> None:
        cell = open_cell(line)
        for number in range(changes):
            op, change = OpId(chance.uuid()), f"{name}{number}"
            for _ in range(10):
                try:
                    value = cell.update(op, append(change))
                except Crash:
                    cell = open_cell(line)  # a new process that knows no more than which operation it was at
                except (OutcomeUnknown, Contended, TransientStorageError):
                    continue
                else:
                    history.acknowledged.append((change, value))
                    break
            else:
                history.given_up.append(change)

    return work


def check(history: History, seed: int) -> None:
    """Raise ``AssertionError`` unless the history is one that an exact cell could have made."""
    story = f"seed {seed}: ended as {history.final!r}, acknowledged {history.acknowledged}"
    found = history.final.split()
    assert len(found) == len(set(found)), f"A change was doubled; {story}"
    given = [change for change, _ in history.acknowledged]
    assert set(given) <= set(found), f"An acknowledged change was lost; {story}"
    assert set(found) <= {*given, *history.given_up}, f"A change came from nowhere; {story}"
    for name in "abcd":
        mine = [change for change in found if change.startswith(name) and change in given]
        assert mine == sorted(mine), f"A writer's changes are out of order; {story}"
    for change, value in history.acknowledged:
        assert change in value.split(), f"{change} was acknowledged with a value that lacks it; {story}"
        assert history.final.startswith(value), f"{value!r} was handed out and is no part of the end; {story}"
