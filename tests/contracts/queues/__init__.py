"""Contract suite for queues: inherit the class, give it a queue, and run it with ``pytest``."""

from tests.contracts.queues.contract import QueueContract
from tests.contracts.queues.places import QueuePlace, without_store

__all__ = ["QueueContract", "QueuePlace", "without_store"]
