"""The contract of key-value stores, in memory and on NATS; test_nats.py tests the rules of NATS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from strandline.kv.contract import KeyValueSubscription
from strandline.kv.memory import MemoryKeyValue
from strandline.kv.nats.bucket import NatsKeyValue
from strandline.model.keyed import Update
from tests.contracts.key_values import KeyValueContract, churn
from tests.cuttable_nats import NatsLine
from tests.servers import NatsServer


class TestMemoryBucket(KeyValueContract):
    @pytest.fixture
    def kv(self) -> MemoryKeyValue:
        return MemoryKeyValue()

    def recreate(self, kv: MemoryKeyValue) -> MemoryKeyValue:
        return MemoryKeyValue()

    def expire(self, kv: MemoryKeyValue) -> None:
        versions = [entry.version for entry in kv.scan()]
        kv.trim(min(version for version in versions if version is not None))

    def overrun(self, kv: MemoryKeyValue, subscription: KeyValueSubscription) -> list[Update]:
        made = churn(kv, 20)
        assert made[-3].version is not None
        kv.trim(made[-3].version)
        return made

    def evict(self, kv: MemoryKeyValue, key: bytes) -> bool:
        kv.evict(key)
        return True


@pytest.mark.matrix
class TestAMemoryBucketThatKeepsLittle(TestMemoryBucket):
    """With a history so short that retention itself overruns and expires."""

    @pytest.fixture
    def kv(self) -> MemoryKeyValue:
        return MemoryKeyValue(history=300)

    def overrun(self, kv: MemoryKeyValue, subscription: KeyValueSubscription) -> list[Update]:
        return churn(kv, 140)


class NatsContract(KeyValueContract):
    any_bytes = False
    rounds = 120
    history: ClassVar[int]

    @pytest.fixture
    def kv(self, nats_server: NatsServer) -> Iterator[NatsKeyValue]:
        name = f"contract-{uuid4().hex}"
        with NatsKeyValue.connect(nats_server.url, name, create=True, history=self.history, prefetch=16) as kv:
            yield kv
            kv._connection.ask(f"STREAM.DELETE.{kv._stream}", "Removing")

    def recreate(self, kv: NatsKeyValue) -> NatsKeyValue:
        kv._connection.ask(f"STREAM.DELETE.{kv._stream}", "Removing")
        kv._create(history=self.history, ttl=None, max_bytes=None, replicas=1)
        return kv

    def expire(self, kv: NatsKeyValue) -> None:
        purge(kv, {"seq": min(entry.version for entry in kv.scan() if entry.version is not None)})

    def overrun(self, kv: NatsKeyValue, subscription: KeyValueSubscription) -> list[Update]:
        # More than may be under way to the watch, so that some are still with the server when it drops them.
        made = churn(kv, 20)
        purge(kv, {"seq": made[-1].version})
        return made

    def evict(self, kv: NatsKeyValue, key: bytes) -> bool:
        purge(kv, {"filter": kv._subjects + key.decode()})
        return True

    @contextmanager
    def failing_listings(self, kv: NatsKeyValue) -> Iterator[None]:
        """The tenth message of every consumer is lost on the way."""
        straight = kv._connection
        with NatsLine(urlsplit(straight.url).port) as line, NatsKeyValue.connect(line.url, kv._bucket) as robbed:
            line.robs = lambda reply: reply.startswith("$JS.ACK.") and reply.split(".")[6] == "10"
            kv._connection = robbed._connection
            try:
                yield
            finally:
                kv._connection = straight


def purge(kv: NatsKeyValue, what: dict[str, object]) -> None:
    kv._connection.ask(f"STREAM.PURGE.{kv._stream}", "Purging", what)


class TestNatsKeyValue(NatsContract):
    history = 8


@pytest.mark.matrix
class TestNatsKeyValueThatKeepsOneValue(NatsContract):
    history = 1
