"""The bucket contract on the bucket in memory and on NATS; what is special about NATS is in test_nats.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from strandline.kv.contract import Subscription
from strandline.kv.memory import MemoryKeyValue
from strandline.kv.nats.bucket import NatsKeyValue
from strandline.model.keyed import Update
from strandline.testing.key_values import KeyValueContract, churn
from tests.line import NatsLine
from tests.servers import NatsServer


class TestMemoryBucket(KeyValueContract):
    @pytest.fixture
    def bucket(self) -> MemoryKeyValue:
        return MemoryKeyValue()

    def recreate(self, bucket: MemoryKeyValue) -> MemoryKeyValue:
        return MemoryKeyValue()

    def expire(self, bucket: MemoryKeyValue) -> None:
        versions = [entry.version for entry in bucket.scan()]
        bucket.trim(min(version for version in versions if version is not None))

    def overrun(self, bucket: MemoryKeyValue, subscription: Subscription) -> list[Update]:
        made = churn(bucket, 20)
        assert made[-3].version is not None
        bucket.trim(made[-3].version)
        return made

    def evict(self, bucket: MemoryKeyValue, key: bytes) -> bool:
        bucket.evict(key)
        return True


@pytest.mark.matrix
class TestAMemoryBucketThatKeepsLittle(TestMemoryBucket):
    """With a history so short that retention itself overruns and expires."""

    @pytest.fixture
    def bucket(self) -> MemoryKeyValue:
        return MemoryKeyValue(history=300)

    def overrun(self, bucket: MemoryKeyValue, subscription: Subscription) -> list[Update]:
        return churn(bucket, 140)


class NatsContract(KeyValueContract):
    any_bytes = False
    rounds = 120
    history: ClassVar[int]

    @pytest.fixture
    def bucket(self, nats_server: NatsServer) -> Iterator[NatsKeyValue]:
        name = f"contract-{uuid4().hex}"
        with NatsKeyValue.connect(nats_server.url, name, create=True, history=self.history, prefetch=16) as bucket:
            yield bucket
            bucket._link.ask(f"STREAM.DELETE.{bucket._stream}", "Removing")

    def recreate(self, bucket: NatsKeyValue) -> NatsKeyValue:
        bucket._link.ask(f"STREAM.DELETE.{bucket._stream}", "Removing")
        bucket._create(history=self.history, ttl=None, max_bytes=None, replicas=1)
        return bucket

    def expire(self, bucket: NatsKeyValue) -> None:
        purge(bucket, {"seq": min(entry.version for entry in bucket.scan() if entry.version is not None)})

    def overrun(self, bucket: NatsKeyValue, subscription: Subscription) -> list[Update]:
        # More than may be under way to the watch, so that some are still with the server when it drops them.
        made = churn(bucket, 20)
        purge(bucket, {"seq": made[-1].version})
        return made

    def evict(self, bucket: NatsKeyValue, key: bytes) -> bool:
        purge(bucket, {"filter": bucket._subjects + key.decode()})
        return True

    @contextmanager
    def failing_listings(self, bucket: NatsKeyValue) -> Iterator[None]:
        """The tenth message of every consumer is lost on the way."""
        straight = bucket._link
        with NatsLine(urlsplit(straight.url).port) as line, NatsKeyValue.connect(line.url, bucket._bucket) as robbed:
            line.robs = lambda reply: reply.startswith("$JS.ACK.") and reply.split(".")[6] == "10"
            bucket._link = robbed._link
            try:
                yield
            finally:
                bucket._link = straight


def purge(bucket: NatsKeyValue, what: dict[str, object]) -> None:
    bucket._link.ask(f"STREAM.PURGE.{bucket._stream}", "Purging", what)


class TestNatsBucket(NatsContract):
    history = 8


@pytest.mark.matrix
class TestNatsBucketThatKeepsOneValue(NatsContract):
    history = 1
