"""Random chains from a log over a node into another log, with forced promotions, against a model in plain Python."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

import pytest

import strandline as sl
from strandline.errors import Diverged, NotReady
from strandline.log.memory import MemoryLog
from strandline.model.records import record_batch
from tests.ingestion.sources import append, content
from tests.ingestion.test_outages import eventually

pytestmark = pytest.mark.slow
STEPS = 24


class Row(NamedTuple):
    """A record of the model: an id of its own, its value, and where it was in the origin."""

    id: int
    value: bytes
    origin: int | None = None


def values(log: Any) -> list[bytes]:
    found: list[bytes] = content(log)["value"].to_pylist()
    return found


class Chain:
    """An origin, two nodes of which one leads, and a copy of their log."""

    def __init__(self, seed: int, folder: Any, held: ExitStack) -> None:
        self.dice, self.folder, self.held = random.Random(seed), folder, held
        self.ids, self.counts = count(), Counter[str]()
        self.origin, self.copy = MemoryLog(), MemoryLog()
        self.original: list[Row] = []
        self.rows: list[Row] = []
        self.copied: list[int] = []
        """The ids of the records that the copy holds."""
        self.leader, self.other = "a", "b"
        self.primary = held.enter_context(sl.node.Primary.open(folder / "a", name="a", policy="local"))
        self.replica = self.follow()

    def follow(self) -> Any:
        return self.held.enter_context(
            sl.node.Replica.open(self.folder / self.other, self.primary.url, name=self.other, policy="local")
        )

    def has_all(self) -> bool:
        try:
            return bool(self.replica.reading().bounds().next == len(self.rows)) and values(
                self.replica.reading()
            ) == values(self.primary)
        except NotReady:
            return False

    def new_rows(self) -> list[Row]:
        """Records that are mostly like others."""
        return [Row(next(self.ids), self.dice.choice([b"x", b"x", b"y"])) for _ in range(self.dice.randint(1, 3))]

    def produce(self, log: Any, rows: list[Row], added: list[Row]) -> None:
        found = [row.value for row in added]
        batch = record_batch(timestamps=[1] * len(found), ops=[0] * len(found), keys=found, values=found)
        append(log, batch, writer=1000 + added[0].id)
        rows += added

    def step(self) -> None:
        step = self.dice.choice(["origin", "node", "in", "in", "out", "out", "promote", "translate"])
        self.counts[step] += 1
        getattr(self, f"do_{step}")()
        assert values(self.primary) == [row.value for row in self.rows]

    def do_origin(self) -> None:
        self.produce(self.origin, self.original, self.new_rows())

    def do_node(self) -> None:
        self.produce(self.primary, self.rows, self.new_rows())

    def do_in(self) -> None:
        """Into the node; a promotion may have lost the end of what it held, and then it is appended again."""
        known = max((row.origin + 1 for row in self.rows if row.origin is not None), default=0)
        with sl.node.RemoteLog(self.primary.url) as target:
            assert sl.ingest(self.origin, target).records == len(self.original) - known
        self.rows += [Row(next(self.ids), row.value, at) for at, row in enumerate(self.original) if at >= known]

    def is_same(self) -> bool:
        return self.copied == [row.id for row in self.rows[: len(self.copied)]]

    def do_out(self) -> None:
        with sl.node.RemoteLog(self.primary.url) as source:
            if not self.is_same():
                with pytest.raises(Diverged):
                    sl.ingest(source, self.copy)
                self.counts["diverged"] += 1
                self.copy, self.copied = MemoryLog(), []
            assert sl.ingest(source, self.copy).records == len(self.rows) - len(self.copied)
        self.copied = [row.id for row in self.rows]
        assert values(self.copy) == [row.value for row in self.rows]

    def do_translate(self) -> None:
        if not self.copied:
            return
        at = self.dice.randint(0, len(self.copied))
        with sl.node.RemoteLog(self.primary.url) as source:
            logs = {"source": source, "target": self.copy}
            if self.is_same():
                assert sl.bulk.translate_cursor(source.cursor_at(at), **logs).next == at
                assert sl.bulk.translate_cursor(self.copy.cursor_at(at), **logs).next == at
                return
            with pytest.raises(Diverged):
                sl.bulk.translate_cursor(self.copy.cursor_at(at), **logs)
            self.counts["diverged"] += 1

    def do_promote(self) -> None:
        """The replica leads, perhaps without the last records; the folder of the former primary is lost with them."""
        eventually(self.has_all)
        kept = list(self.rows)
        if self.dice.random() < 0.7:
            self.replica.close()
            for _ in range(self.dice.randint(1, 3)):
                self.dice.choice([self.do_node, self.do_node, self.do_in])()
                self.dice.choice([self.do_out, lambda: None])()
            self.counts["lossy"] += self.rows != kept
            self.replica = self.follow() if self.rows == kept else None
        self.primary.close()
        if self.replica is None:
            self.replica = self.follow()
            shutil.rmtree(self.folder / self.leader)  # its records were committed: it would not discard them by itself
        self.rows = kept
        self.primary = self.held.enter_context(self.replica.promote(force=True))
        self.leader, self.other = self.other, self.leader
        self.replica = self.follow()
        if self.dice.random() < 0.5:
            self.do_node()


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_over_nodes_that_are_promoted_by_force_holds_one_history(tmp_path, seed):
    with ExitStack() as held:
        chain = Chain(seed, tmp_path, held)
        for _ in range(STEPS):
            chain.step()
        chain.do_out()
