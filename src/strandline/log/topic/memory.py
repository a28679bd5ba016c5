"""A topic in this process: of logs in memory."""

from __future__ import annotations

from typing import final

from strandline.errors import InvalidInput
from strandline.log.memory import MemoryLog
from strandline.log.topic.contract import check_count, check_partition
from strandline.log.topic.logs import IN_MEMORY, LogTopic
from strandline.model.arguments import checked
from strandline.storage.clock import CHANCE, Chance
from strandline.storage.fork_check import bound_to_process


@bound_to_process()
@final
@checked
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
        """An empty topic of ``partition_count`` partitions, at least one."""
        self._logs = [MemoryLog(chance=chance) for _ in range(check_count(partition_count))]
        super().__init__(self._logs, pieces=IN_MEMORY, polling=None, chance=chance)

    def trim(self, partition: int, upto: int) -> None:
        """Delete all messages of a partition below an offset, even if subscriptions need them."""
        log = self._logs[check_partition(partition, self.partition_count)]
        bounds = log.bounds()
        if upto > bounds.next:
            raise InvalidInput(f"Partition {partition} ends at offset {bounds.next}: it cannot begin at {upto}.")
        if upto > bounds.first:
            log.trim(upto)
            self._wake(partition)  # the next message of a subscription may be gone, which it must raise
