"""Which metadata partitions are followed, and from where: the only one who adds them to the subscription."""

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
"""How often a partition is begun at once that is trimmed under our hands; then the timer goes on."""


class Assigner:
    """Adds and removes partitions, one call at a time, from any thread. Blocks on the topic, never on a reader's lock.

    What cannot be begun stays assigned and is not ready; :meth:`retry` begins it again.
    """

    def __init__(self, events: Topic, assignment: Assignment, state: MetadataState) -> None:
        """Begin with nothing assigned."""
        self._events = events
        self._assignment = assignment
        self._state = state
        self._serial = threading.Lock()

    def reconcile(self, wanted: Collection[int]) -> None:
        """Follow exactly these: drop what is gone, add what is new, and try again what could not be begun."""
        with self._serial:
            for partition in self._state.those(lambda standing: standing.assigned):
                if partition not in wanted:
                    # First it answers nothing, then it is taken away: not the other way round.
                    self._state.drop(partition)
                    self._assignment.remove(partition)
            for partition in sorted(wanted):
                if not self._state.standing(partition).assigned:
                    self._state.assign(partition)
            self._begin_waiting()

    def retry(self) -> None:
        """Begin what could not be begun before."""
        with self._serial:
            self._begin_waiting()

    def recover(self) -> None:
        """Begin again what the subscription has given up because its next event is deleted."""
        with self._serial:
            left = set(self._assignment.partitions())
            for partition in self._state.those(lambda standing: standing.is_followed):
                if partition not in left:
                    self._state.unaim(partition)
            self._begin_waiting()

    def pause(self, partition: int) -> None:
        """Take a partition from the subscription, not ready, until :meth:`retry` begins it where it is applied."""
        with self._serial:
            if self._state.standing(partition).is_followed:
                self._state.unaim(partition)
                self._assignment.remove(partition)

    def replay(self, partition: int, why: str) -> None:
        """Forget what was applied of a partition, and begin it from its first event."""
        with self._serial:
            if self._state.standing(partition).is_followed:
                _LOGGER.warning(_REPLAYED, partition, why)
                self._state.forget(partition)
                self._begin_waiting()

    def leave(self, partition: int) -> None:
        """Take a partition that cannot go on from the subscription; it stays assigned."""
        with self._serial:
            if self._state.standing(partition).trouble:
                self._assignment.remove(partition)

    def _begin_waiting(self) -> None:
        for partition in self._state.those(lambda standing: standing.is_waiting):
            try:
                self._begin(partition)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not ready, and the others go on
                _LOGGER.warning("Metadata partition %d cannot be begun and is tried again: %s", partition, error)

    def _begin(self, partition: int) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self._assignment.remove(partition)  # if it is there, it is from another position
            bounds = self._events.bounds(partition)
            begin = self._state.resume(partition, bounds)
            if begin.replay:
                _LOGGER.warning(_REPLAYED, partition, begin.replay)
            try:
                self._assignment.add(partition, begin.start)
            except CursorExpired:
                if attempt == _ATTEMPTS:
                    raise
                continue  # trimmed since the bounds were fetched
            # Only now: a partition whose target is reached is ready, and must be followed then.
            self._state.aim(partition, bounds.next)
            return
