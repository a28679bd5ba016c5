"""The contract of queues on every place that needs no server."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.storage.retry import RetryingStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.queues import QueueContract, QueuePlace
from tests.followers.consumer.queue_places import ObjectLogPlace, V1Place


@pytest.mark.matrix
class TestOwnLogInPlainMemory(QueueContract):
    picklable = False

    @pytest.fixture
    def place(self) -> QueuePlace:
        return ObjectLogPlace(PlainStore())


@pytest.mark.matrix
class TestOwnLogInMemory(QueueContract):
    picklable = False

    @pytest.fixture
    def place(self) -> QueuePlace:
        return ObjectLogPlace(open_store(f"memory://consumer-{uuid4().hex}"))


class TestOwnLogInFolder(QueueContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> QueuePlace:
        return ObjectLogPlace(open_store(str(tmp_path)))


@pytest.mark.matrix
class TestV1InPlainMemory(QueueContract):
    picklable = False

    @pytest.fixture
    def place(self) -> QueuePlace:
        return V1Place(PlainStore())


class TestV1InFolder(QueueContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> QueuePlace:
        return V1Place(open_store(str(tmp_path)))


def bad_line() -> ObjectStore:
    """A store that loses every fifth answer, wrapped in the retries of every opened store."""
    faults = Faults(after=0.2, before=0.05, throttled=0.05)
    return RetryingStore(
        FaultyStore(PlainStore(), seed=7, faults=faults), env=Env(clock=ManualClock(), chance=SeededChance(7))
    )


@pytest.mark.matrix
class TestOwnLogOverABadLine(QueueContract):
    picklable = False
    lossy = True

    @pytest.fixture
    def place(self) -> QueuePlace:
        return ObjectLogPlace(bad_line())


@pytest.mark.matrix
class TestV1OverABadLine(QueueContract):
    picklable = False
    lossy = True

    @pytest.fixture
    def place(self) -> QueuePlace:
        return V1Place(bad_line())
