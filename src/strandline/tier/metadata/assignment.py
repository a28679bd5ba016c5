"""Assignment of metadata partitions: the only writer of the subscription's assignment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Final

from strandline.errors import CursorExpired
from strandline.log.topic.contract import Assignment, Topic
from strandline.tier.metadata.state import MetadataState

_LOGGER = logging.getLogger(__name__)
_REPLAYED: Final = "All events of metadata partition %d are replayed: %s."
_ATTEMPTS: Final = 3
"""How often to restart at once a partition that is trimmed meanwhile; then the timer retries."""


class Assigner:
    """Adds and removes partitions, one call at a time, from any thread. Blocks on the topic, never on a reader's lock.

    A partition that cannot be started stays assigned and is not ready; :meth:`retry` starts it again.
    """

    def __init__(self, events: Topic, assignment: Assignment, state: MetadataState) -> None:
        """Start with nothing assigned."""
        self._events = events
        self._assignment = assignment
        self._state = state
        self._serial = threading.Lock()

    def reconcile(self, wanted: Collection[int]) -> None:
        """Follow exactly these partitions: drop and add the difference, and retry those that could not be started."""
        with self._serial:
            for partition in self._state.partitions_where(lambda progress: progress.assigned):
                if partition not in wanted:
                    # It must stop answering before its events stop.
                    self._state.drop(partition)
                    self._assignment.remove(partition)
            for partition in sorted(wanted):
                if not self._state.progress(partition).assigned:
                    self._state.assign(partition)
            self._start_waiting()

    def retry(self) -> None:
        """Start the partitions that could not be started before."""
        with self._serial:
            self._start_waiting()

    def recover(self) -> None:
        """Restart the partitions that the subscription dropped because their next event is deleted."""
        with self._serial:
            left = set(self._assignment.partitions())
            for partition in self._state.partitions_where(lambda progress: progress.is_followed):
                if partition not in left:
                    self._state.set_target(partition, None)
            self._start_waiting()

    def pause(self, partition: int) -> None:
        """Unsubscribe a partition, not ready, until :meth:`retry` restarts it at its position."""
        with self._serial:
            if self._state.progress(partition).is_followed:
                self._state.set_target(partition, None)
                self._assignment.remove(partition)

    def replay(self, partition: int, why: str) -> None:
        """Discard the cache of a partition and replay all its events."""
        with self._serial:
            if self._state.progress(partition).is_followed:
                _LOGGER.warning(_REPLAYED, partition, why)
                self._state.forget(partition)
                self._start_waiting()

    def leave(self, partition: int) -> None:
        """Unsubscribe a stopped partition; it stays assigned."""
        with self._serial:
            if self._state.progress(partition).trouble:
                self._assignment.remove(partition)

    def _start_waiting(self) -> None:
        for partition in self._state.partitions_where(lambda progress: progress.is_waiting):
            try:
                self._start(partition)
            except Exception as error:  # noqa: BLE001 - the partition stays not ready, and the others go on
                _LOGGER.warning("Metadata partition %d cannot be started and is tried again: %s", partition, error)

    def _start(self, partition: int) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self._assignment.remove(partition)  # it may be subscribed at another position
            bounds = self._events.bounds(partition)
            start, replay = self._state.resume(partition, bounds)
            if replay:
                _LOGGER.warning(_REPLAYED, partition, replay)
            try:
                self._assignment.add(partition, start)
            except CursorExpired:
                if attempt == _ATTEMPTS:
                    raise
                continue  # trimmed since the bounds were fetched
            # Only now: a partition at its target is ready, and must be subscribed by then.
            self._state.set_target(partition, bounds.next)
            return
