"""Event follower: takes segment events from the subscription, decodes them and applies them to the caches."""

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
_BLOCK: Final = 256
"""How many events are applied under one lock: readers wait a few milliseconds at most."""


class EventFollower:
    """Applies published events to the caches, one round per call. Used by one thread."""

    def __init__(
        self,
        subscription: TopicSubscription,
        assigner: Assigner,
        state: MetadataState,
        known: Mapping[bytes, SegmentEvent],
    ) -> None:
        """Follow a subscription. ``known`` maps the bytes of events in flight to the events."""
        self._known = known
        self._subscription = subscription
        self._assigner = assigner
        self._state = state

    def step(self, timeout: float) -> bool:
        """Take and apply the next events, waiting up to ``timeout`` seconds. False if none came.

        Raises what the subscription raises, except for deleted events: their partition is restarted.
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
            for begin in range(0, len(row), _BLOCK):
                if not self._apply(partition, row[begin : begin + _BLOCK]):
                    break
        return bool(messages)

    def _apply(self, partition: int, messages: Sequence[Message]) -> bool:
        """Apply messages of one partition; False if the messages after them must not be applied."""
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
            # Taken before the partition was restarted from an earlier position, or offsets are missing. Nothing
            # skips a gap: delivery restarts at the position.
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
