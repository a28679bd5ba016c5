"""Contract suite for topics: inherit the class, define how a topic is created, and run it with ``pytest``."""

from tests.contracts.topics.contract import TopicContract
from tests.contracts.topics.hooks import FOREVER, SOON, TopicOwner, by_partition, collect, numbered
from tests.contracts.topics.retention import RetentionContract

__all__ = [
    "FOREVER",
    "SOON",
    "RetentionContract",
    "TopicContract",
    "TopicOwner",
    "by_partition",
    "collect",
    "numbered",
]
