"""Contract suite for key-value stores: inherit the class, give it a store, and run it with ``pytest``."""

from __future__ import annotations

from tests.contracts.key_values.hooks import KEYS, SCOPES, Collected, KeyValueOwner, churn, current, fill, fold
from tests.contracts.key_values.reading import KeyValueReadContract
from tests.contracts.key_values.resuming import ResumingContract
from tests.contracts.key_values.watching import WatchingContract


class KeyValueContract(KeyValueReadContract, WatchingContract, ResumingContract):
    """Every sentence of :mod:`strandline.kv.contract`, as a test.

    A subclass named ``Test...`` defines the fixture ``kv``, an empty key-value store for each test, and the methods of
    :class:`KeyValueOwner`, which do what the contract leaves to the key-value store's owner.
    """


__all__ = ["KEYS", "SCOPES", "Collected", "KeyValueContract", "KeyValueOwner", "churn", "current", "fill", "fold"]
