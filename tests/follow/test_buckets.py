"""The bucket contract on the bucket in memory and on NATS; what is special about NATS is in test_nats.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from strandline.follow.keyed.contract import Subscription
from strandline.follow.keyed.memory import MemoryBucket
from strandline.follow.keyed.nats import NatsBucket
from strandline.model.keyed import Update
from strandline.testing.buckets import BucketContract, churn
from tests.line import NatsLine
from tests.servers import NatsServer


class TestMemoryBucket(BucketContract):
    @pytest.fixture
    def bucket(self) -> MemoryBucket:
        return MemoryBucket()

    def recreate(self, bucket: MemoryBucket) -> MemoryBucket:
        return MemoryBucket()

    def expire(self, bucket: MemoryBucket) -> None:
        versions = [entry.version for entry in bucket.scan()]
        bucket.trim(min(version for version in versions if version is not None))

    def overrun(self, bucket: MemoryBucket, subscription: Subscription) -> list[Update]:
        made = churn(bucket, 20)
        assert made[-3].version is not None
        bucket.trim(made[-3].version)
        return made

    def evict(self, bucket: MemoryBucket, key: bytes) -> bool:
        bucket.evict(key)
        return True


@pytest.mark.matrix
class TestAMemoryBucketThatKeepsLittle(TestMemoryBucket):
    """With a history so short that retention itself overruns and expires."""

    @pytest.fixture
    def bucket(self) -> MemoryBucket:
        return MemoryBucket(history=300)

    def overrun(self, bucket: MemoryBucket, subscription: Subscription) -> list[Update]:
        return churn(bucket, 140)


class NatsContract(BucketContract):
    any_bytes = False
    rounds = 120
    history: ClassVar[int]

    @pytest.fixture
    def bucket(self, nats_server: NatsServer) -> Iterator[NatsBucket]:
        name = f"contract-{uuid4().hex}"
        with NatsBucket.connect(nats_server.url, name, create=True, history=self.history, prefetch=16) as bucket:
            yield bucket
            bucket._link.ask(f"STREAM.DELETE.{bucket._stream}", "Removing")

    def recreate(self, bucket: NatsBucket) -> NatsBucket:
        bucket._link.ask(f"STREAM.DELETE.{bucket._stream}", "Removing")
        bucket._create(history=self.history, ttl=None, max_bytes=None, replicas=1)
        return bucket

    def expire(self, bucket: NatsBucket) -> None:
        purge(bucket, {"seq": min(entry.version for entry in bucket.scan() if entry.version is not None)})

    def overrun(self, bucket: NatsBucket, subscription: Subscription) -> list[Update]:
        # More than may be under way to the watch, so that some are still with the server when it drops them.
        made = churn(bucket, 20)
        purge(bucket, {"seq": made[-1].version})
        return made

    def evict(self, bucket: NatsBucket, key: bytes) -> bool:
        purge(bucket, {"filter": bucket._subjects + key.decode()})
        return True

    @contextmanager
    def failing_listings(self, bucket: NatsBucket) -> Iterator[None]:
        """The tenth message of every consumer is lost on the way."""
        straight = bucket._link
        with NatsLine(urlsplit(straight.url).port) as line, NatsBucket.connect(line.url, bucket._bucket) as robbed:
            line.robs = lambda reply: reply.startswith("$JS.ACK.") and reply.split(".")[6] == "10"
            bucket._link = robbed._link
            try:
                yield
            finally:
                bucket._link = straight


def purge(bucket: NatsBucket, what: dict[str, object]) -> None:
    bucket._link.ask(f"STREAM.PURGE.{bucket._stream}", "Purging", what)


class TestNatsBucket(NatsContract):
    history = 8


@pytest.mark.matrix
class TestNatsBucketThatKeepsOneValue(NatsContract):
    history = 1
