"""Takes segment events from the subscription, decodes them and gives them to the caches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from strandline.errors import CorruptData, CursorExpired, UnsupportedVersion
from strandline.formats.segment.events import decode_event
from strandline.log.topic.contract import Message, TopicSubscription
from strandline.model.segments import SegmentEvent
from strandline.storage.metrics import SEGMENT_EVENTS
from strandline.tier.metadata.assignment import Assigner
from strandline.tier.metadata.state import Decoded, MetadataState

_LOGGER = logging.getLogger(__name__)
_APPLIED, _REFUSED, _UNDECODABLE = (SEGMENT_EVENTS.labels(name) for name in ("applied", "refused", "undecodable"))
_STROKE: Final = 256
"""How many events are applied at once: readers wait so long at most, a few milliseconds."""


class Follower:
    """Moves what was published into the caches, one round at a time. One thread steps."""

    def __init__(
        self,
        subscription: TopicSubscription,
        assigner: Assigner,
        state: MetadataState,
        known: Mapping[bytes, SegmentEvent],
    ) -> None:
        """Follow a subscription, to which the assigner adds partitions. ``known`` has some events by their bytes."""
        self._known = known
        self._subscription = subscription
        self._assigner = assigner
        self._state = state

    def step(self, timeout: float) -> bool:
        """Take and apply what comes next; waits for it no longer than so many seconds. False if nothing came.

        Raises what taking raises, but for events that were deleted: their partition is begun again.
        """
        try:
            messages = self._subscription.take(timeout)
        except CursorExpired as error:
            _LOGGER.warning("Segment events were deleted before they were followed: %s", error)
            self._assigner.recover()
            return True
        rows: dict[int, list[Message]] = {}
        for message in messages:
            rows.setdefault(message.partition, []).append(message)
        for partition, row in rows.items():
            for begin in range(0, len(row), _STROKE):
                if not self._apply(partition, row[begin : begin + _STROKE]):
                    break
        return bool(messages)

    def _apply(self, partition: int, messages: Sequence[Message]) -> bool:
        """Apply messages of one partition; False if those that follow them are not to be applied."""
        decoded: list[Decoded] = []
        newer: tuple[int, UnsupportedVersion] | None = None
        for _, offset, payload in messages:
            event = self._known.get(payload)
            try:
                if event is None:
                    event = decode_event(payload, f"Event {offset} of metadata partition {partition}")
                decoded.append((offset, event))
            except CorruptData as error:
                decoded.append((offset, error))
            except UnsupportedVersion as error:
                newer = offset, error
                break
        try:
            done = self._state.absorb(partition, decoded)
        except Exception:
            _LOGGER.exception("Metadata partition %d could not be applied and is not ready.", partition)
            self._assigner.leave(partition)
            return False
        _APPLIED.inc(done.applied)
        _REFUSED.inc(len(done.refused))
        _UNDECODABLE.inc(len(done.skipped))
        for offset, refusal in done.refused:
            _LOGGER.info("Event %d of metadata partition %d is refused: %s", offset, partition, refusal)
        for offset, reason in done.skipped:
            _LOGGER.warning("Event %d of metadata partition %d is skipped: %s", offset, partition, reason)
        if done.gap:
            # They were taken before the partition was begun again from an earlier position, or there is a hole:
            # nothing jumps it. What comes next is delivered from the position on, in a moment.
            _LOGGER.warning("Events of metadata partition %d came out of order and are taken again.", partition)
            self._assigner.pause(partition)
            return False
        if newer is not None:
            offset, unknown = newer
            if self._state.stop(partition, offset, str(unknown).rstrip(".")):
                _LOGGER.error("Metadata partition %d is not ready: %s", partition, unknown)
                self._assigner.leave(partition)
            return False
        return True
