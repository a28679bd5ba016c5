"""The suites of logs, on a log in two tiers: with nothing tiered, with everything tiered, and with the seam between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from strandline.log.object import ObjectLog, open_log
from strandline.log.topic.memory import MemoryTopic
from strandline.log.wal.log import WalLog
from strandline.model.retention import Invalidation, InvalidReason
from strandline.model.stamp import OpId
from strandline.storage.objects.urls import open_store
from strandline.tier.attachment import ColdCell
from strandline.tier.copy.segment_files import forget_tails
from strandline.tier.copy.tierer import Tierer
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.cold_reader import ColdReader
from strandline.tier.read.tiered_log import TieredLog
from tests.contracts.logs import LogContract, append
from tests.tier.read.tiered_logs import Settled, forget, value_at

GONE = Invalidation(InvalidReason.HORIZON, 1)


class Tiering:
    """Opens logs of one kind, with a cold tier in a folder beside them."""

    appends = 4
    scheme = "file://"

    @pytest.fixture
    def tiers(self, tmp_path: Path) -> Iterator[tuple[TieredLog, Tierer]]:
        forget_tails()
        with ExitStack() as opened:
            hot = self.open(str(tmp_path / "log"), opened)
            store, topic = open_store(f"{self.scheme}{tmp_path / 'cold'}"), MemoryTopic(2)
            cell = ColdCell(store, hot.log_id)
            cell.attach(store.url, "memory://events", partitions=2)
            manager = opened.enter_context(MetadataManager.start(topic))
            manager.reconcile_assignment(range(2))
            tierer = Tierer(hot, manager, store, announced=cell)
            log = TieredLog(hot, cell, lambda _: ColdReader(manager, store, tierer.partition))
            yield log, tierer

    def open(self, folder: str, opened: ExitStack) -> ObjectLog | WalLog:
        raise NotImplementedError

    def invalidate(self, log: Any, name: str) -> None:
        if isinstance(log.hot, WalLog):
            log.hot.slots.invalidate(name, InvalidReason.HORIZON)
        else:
            log.hot.slots.cell(name).update(OpId(uuid4()), lambda slot: replace(slot, invalid=GONE))


class OnObjects(Tiering):
    def open(self, folder: str, _: ExitStack) -> ObjectLog | WalLog:
        return open_log(f"{self.scheme}{folder}", create=True)


class InMemory(OnObjects):
    picklable = False
    scheme = "memory://"


class OnWal(Tiering):
    def open(self, folder: str, opened: ExitStack) -> ObjectLog | WalLog:
        return opened.enter_context(WalLog.open(folder, tail_bytes=0, roll_bytes=0))


class AllHot(LogContract):
    """There is a cold tier, and nothing in it."""

    @pytest.fixture
    def log(self, tiers: tuple[TieredLog, Tierer]) -> TieredLog:
        return tiers[0]

    def retain_from(self, log: TieredLog, offset: int) -> None:
        forget(log.hot, offset)


class Cold(LogContract):
    """All but the newest batches is in segments only."""

    kept = 0

    @pytest.fixture
    def log(self, tiers: tuple[TieredLog, Tierer]) -> Settled:
        log, tierer = tiers
        return Locked(log, tierer, kept=self.kept)

    def retain_from(self, log: Settled, offset: int) -> None:
        log.retain_from(offset)

    @pytest.fixture
    def filled(self, log: Settled) -> Settled:
        """As in the suite, but no batch is so large that it becomes several row groups, which are what spans are."""
        append(log, b"0", b"1", b"2", number=0)
        append(log, b"3", number=1)
        append(log, *(b"".join(map(value_at, range(100 * value, 100 * value + 20))) for value in b"4567"), number=2)
        append(log, b"8", b"9", number=3)
        return log

    def test_a_newcomer_begins_where_it_asks_to(self, filled: Settled) -> None:
        """A segment goes as a whole: the log begins at the end of one, and not within."""
        first, middle, end = 3, 5, filled.bounds().next
        self.retain_from(filled, first)
        assert filled.position_of("retained") == first
        assert filled.position_of("beginning") == 0
        assert filled.position_of("now") == end
        assert filled.position_of(middle) == middle
        assert filled.position_of(filled.start().at(middle)) == middle
        assert filled.position_of(datetime(1980, 1, 1, tzinfo=UTC)) == first
        assert filled.position_of(datetime(2999, 1, 1, tzinfo=UTC)) == end


class Locked(Settled):
    """One that several threads may use: a tierer is used by one."""

    _lock = threading.Lock()

    def settle(self) -> None:
        with self._lock:
            super().settle()


@pytest.mark.matrix
class TestObjectLogWithNothingTiered(InMemory, AllHot):
    pass


@pytest.mark.matrix
class TestObjectLogInSegments(OnObjects, Cold):
    pass


class TestObjectLogAcrossTheSeam(InMemory, Cold):
    kept = 1


@pytest.mark.matrix
class TestWalLogWithNothingTiered(OnWal, AllHot):
    pass


@pytest.mark.matrix
class TestWalLogInSegments(OnWal, Cold):
    pass


@pytest.mark.matrix
class TestWalLogAcrossTheSeam(OnWal, Cold):
    kept = 2
