"""Dead letters of a consumer: batches that cannot be read are stored, and count as acknowledged in their turn."""

from __future__ import annotations

import logging
import threading
from typing import Final

from strandline.errors import CorruptData, NotFound, TooManyDeadLetters
from strandline.followers.consumer.progress import AckProgress, Gauges
from strandline.log.queue.contract import Queue
from strandline.model.head import Descriptor

_LOGGER: Final = logging.getLogger(__name__)


class BatchDeadLetters:
    """Sets batches aside, up to a limit. The caller holds the lock of reading; ``state`` guards the positions."""

    def __init__(
        self,
        queue: Queue,
        progress: AckProgress,
        gauges: Gauges,
        state: threading.Lock,
        *,
        limit: int,
        raises: bool,
    ) -> None:
        """With ``raises`` an unreadable batch is an error, unless the caller sets it aside."""
        self._queue = queue
        self._progress = progress
        self._gauges = gauges
        self._state = state
        self._limit = limit
        self._raises = raises

    def take(self, descriptor: Descriptor, error: CorruptData | NotFound) -> None:
        """Set an unreadable batch aside, with a warning, or raise its error."""
        if self._raises:
            raise error
        try:
            where = self.set_aside(descriptor, str(error))
        except TooManyDeadLetters as limit:
            raise limit from error
        _LOGGER.warning("Batch %d of %s was set aside as %s: %s", descriptor.sequence, self._queue.url, where, error)

    def set_aside(self, descriptor: Descriptor, reason: str) -> str:
        """Durably store what is left of a batch, and move past it; returns its location. ``TooManyDeadLetters``."""
        with self._state:
            self._progress.check_aside(descriptor)
        if (before := self._gauges.dead_letters) >= self._limit:
            raise TooManyDeadLetters(
                f"Batch {descriptor.sequence} ({descriptor.location}) of {self._queue.url} cannot be read, and "
                f"{before} were set aside before it, which is the limit: find out what damages them. The cursor stays "
                f"before it. {reason}"
            )
        where = self._queue.dead_letter(descriptor, reason)  # durable before the consumer continues
        with self._state:
            self._progress.set_aside(descriptor)
            self._gauges.set_aside()
        return where
