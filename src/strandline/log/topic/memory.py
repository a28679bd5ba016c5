"""In-memory topic: for one process and for tests."""

from __future__ import annotations

from strandline.errors import InvalidInput
from strandline.log.memory import MemoryLog
from strandline.log.topic.contract import check_count, check_partition
from strandline.log.topic.logs import IN_MEMORY, LogTopic
from strandline.storage.clock import CHANCE, Chance


class MemoryTopic(LogTopic):
    """A topic that ends with its process. Satisfies :class:`~strandline.log.topic.contract.Topic`; safe in threads.

    >>> topic = MemoryTopic(2)
    >>> stream, assignment = topic.subscribe([(1, 0)])
    >>> topic.publish(1, b"hello")
    0
    >>> stream.take(timeout=1.0)
    [Message(partition=1, offset=0, payload=b'hello')]
    """

    def __init__(self, partition_count: int, *, chance: Chance = CHANCE) -> None:
        """An empty topic of so many partitions, at least one."""
        self._in_memory = [MemoryLog(chance=chance) for _ in range(check_count(partition_count))]
        super().__init__(self._in_memory, pieces=IN_MEMORY, polling=None, chance=chance)

    def trim(self, partition: int, upto: int) -> None:
        """Forget all messages of a partition below an offset, whoever still wants them."""
        log = self._in_memory[check_partition(partition, self.partition_count)]
        first, following = log.bounds().first, log.bounds().next
        if upto > following:
            raise InvalidInput(f"Partition {partition} ends at offset {following}: it cannot begin at {upto}.")
        log.trim(max(first, upto))
        self._wake(partition)  # what a subscription waits for may be gone, and it has to say so
