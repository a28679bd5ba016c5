"""Queues of version 1: a format that is shared with other implementations, read and written as it is."""

from strandline.log.v1.log import QueueLog, open_queue

__all__ = ["QueueLog", "open_queue"]
