"""What every bucket of keyed values must do: inherit the class, give it a bucket, and run it with ``pytest``."""

from __future__ import annotations

from strandline.testing.buckets.owner import KEYS, SCOPES, BucketOwner, Collected, churn, current, fill, fold
from strandline.testing.buckets.reading import ReadingContract
from strandline.testing.buckets.resuming import ResumingContract
from strandline.testing.buckets.watching import WatchingContract


class BucketContract(ReadingContract, WatchingContract, ResumingContract):
    """Every sentence of :mod:`strandline.follow.keyed.contract`, as a test.

    A subclass named ``Test...`` defines the fixture ``bucket``, an empty bucket for each test, and the methods of
    :class:`BucketOwner`, which do what the contract leaves to the bucket's owner.
    """


__all__ = ["KEYS", "SCOPES", "BucketContract", "BucketOwner", "Collected", "churn", "current", "fill", "fold"]
