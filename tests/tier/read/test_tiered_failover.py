"""A log that failed over to a replica, beside a cold tier: the new primary's history is kept, the old one is retired.

Each node's copy is taken out of its folder and is a write-ahead log on its own: the same log, with the terms that the
nodes gave it. What nodes do with their cold tier themselves is tested with the nodes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import Diverged, Unsupported
from strandline.log.wal.log import WalLog
from strandline.model.retention import parse_retention
from strandline.node import Primary, Replica
from strandline.tier.copy.segment_files import forget_tails
from tests.tier.read.tiered_logs import rows

WAIT = 60.0
NOWHERE = "grpc://127.0.0.1:9"


@pytest.fixture
def copies(tmp_path: Path) -> dict[str, Path]:
    """The logs of two nodes: ``a`` led, and has ten records; ``b`` had five of them, was promoted and has five more."""
    with Primary.open(tmp_path / "a", name="a") as former:
        with Replica.open(tmp_path / "b", former.url, name="b") as replica:
            shared = former.append_values([b"shared %d" % number for number in range(5)])
            replica.reading(after=shared.bookmark, timeout=WAIT)
            assert replica.wait_until(lambda: former.commit_watermark(1) == 5, WAIT), "it has acknowledged them"
        former.append_values([b"of a %d" % number for number in range(5, 10)])
        with pytest.raises(Unsupported, match="belongs to the node"):
            sl.tier.attach(former.node.primary.log)
    with Replica.open(tmp_path / "b", NOWHERE, name="b") as replica:
        promoted = replica.promote(force=True)
        promoted.append_values([b"of b %d" % number for number in range(5, 10)])
        with pytest.raises(Unsupported, match="belongs to the node"):
            sl.tier.attach(promoted.node.primary.log)
    found = {}
    for name in ("a", "b"):
        (folder,) = [path.parent for path in (tmp_path / name).glob("*/log.json")]
        found[name] = Path(shutil.copytree(folder, tmp_path / "on their own" / name))
        with WalLog.open(found[name]) as log:
            for slot in log.slots.list():  # of a replica, which it has no longer
                log.slots.drop(slot.name)
    return found


@contextmanager
def opened(folder: Path) -> Iterator[WalLog]:
    """The log in a folder, with the cold tier that both copies share."""
    forget_tails()
    cold = folder.parent / "cold"
    with WalLog.open(folder) as log:
        sl.tier.attach(log, cold.as_uri(), (cold / "events").as_uri())
        yield log


def tier(log: WalLog) -> None:
    """Copy everything, and let the hot tier forget it."""
    with sl.tier.tiering(log) as tierer:
        tierer.run_once(everything=True)
    assert log.trim(parse_retention("consumed")) == log.end().next


def values(log: WalLog) -> list[bytes]:
    with sl.tier.tiered(log) as whole:
        return [value for _, value in rows(whole.read())]


def history(name: str) -> list[bytes]:
    own = (b"of %s %d" % (name.encode(), number) for number in range(5, 10))
    return [*(b"shared %d" % number for number in range(5)), *own]


def test_after_a_failover_the_new_primary_s_history_replaces_the_old_one_in_the_cold_tier(
    copies: dict[str, Path],
) -> None:
    with opened(copies["a"]) as log:
        tier(log)
        assert values(log) == history("a")
    with opened(copies["b"]) as log:
        assert values(log) == history("b"), "before a tierer has looked, too"
        tier(log)
        assert values(log) == history("b"), "all of it from segments"


@pytest.mark.matrix
def test_after_a_failover_the_former_primary_s_records_are_not_tiered_over_the_new_one_s(
    copies: dict[str, Path],
) -> None:
    with opened(copies["b"]) as log:
        tier(log)
    with opened(copies["a"]) as log:
        with sl.tier.tiering(log) as tierer, pytest.raises(Diverged, match="Tier the later one"):
            tierer.run_once(everything=True)
        assert log.bounds().next == 10
    with opened(copies["b"]) as log:
        assert values(log) == history("b")
