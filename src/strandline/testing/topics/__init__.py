"""Contract suite for topics: inherit the class, define how a topic is created, and run it with ``pytest``."""

from strandline.testing.topics.contract import TopicContract
from strandline.testing.topics.owner import FOREVER, SOON, TopicOwner, by_partition, collect, numbered
from strandline.testing.topics.retention import RetentionContract

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
