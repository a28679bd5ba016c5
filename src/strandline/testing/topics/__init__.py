"""Contract suite for topics: inherit the class, define how a topic is created, and run it with ``pytest``."""

from strandline.testing.topics.contract import TopicContract
from strandline.testing.topics.forgetting import ForgettingContract
from strandline.testing.topics.owner import FOREVER, SOON, TopicOwner, by_partition, collect, numbered

__all__ = [
    "FOREVER",
    "SOON",
    "ForgettingContract",
    "TopicContract",
    "TopicOwner",
    "by_partition",
    "collect",
    "numbered",
]
