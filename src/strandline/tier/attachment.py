"""The cold tier of a log: how it is attached and found, and how expiry and slots keep out of each other's way.

A slot may be put on an offset that only the cold tier has, while expiry is about to remove that. So each of them says
what it does before it looks at the other: expiry announces its new start and then reads the slots, and whoever has put
a slot there looks at what was announced. One of the two sees the other, whatever the order.

What somebody needs after all stays, and expiry says so. But a second tierer may be expiring, too, one that was replaced
and does not know yet: it has looked before the slot was there, and removes what the other has just promised to keep.
So nothing goes before it was decided, and only who announced last decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, final
from urllib.parse import urlsplit
from uuid import UUID

from strandline.errors import AlreadyExists, CorruptData, InvalidInput, NotFound
from strandline.formats.segment.cold_json import ColdCodec
from strandline.log.topic.contract import Topic
from strandline.log.topic.kafka import KafkaTopic
from strandline.log.topic.logs import open_object_topic
from strandline.model.addresses import refuse_credentials
from strandline.model.cold import COLD_FILE, ColdTier
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.store import ObjectStore

PARTITIONS: Final = 8
"""How many partitions a new topic of events has, if nobody says."""


@final
class ColdCell:
    """What is written down beside a log of its cold tier. Safe in threads; looking changes nothing."""

    def __init__(self, place: ObjectStore, log_id: UUID, *, clock: Clock = CLOCK, chance: Chance = CHANCE) -> None:
        """Of the log in this store."""
        self._log_id = log_id
        self._chance = chance
        self._cell: StoreCell[ColdTier] = StoreCell(place, COLD_FILE, ColdCodec(), clock=clock, chance=chance)

    def look(self) -> ColdTier | None:
        """The cold tier as it is written down now; None if the log has none."""
        try:
            return self._checked(self._cell.read().value)
        except NotFound:
            return None

    def attach(self, store: str, events: str, *, partitions: int = PARTITIONS, name: str = "") -> ColdTier:
        """Durably say where the cold tier is; again with the same is fine. ``AlreadyExists`` if it is elsewhere."""
        wanted = ColdTier(self._log_id, store, events, partitions, name)
        try:
            return self._cell.create(self._op(), wanted)
        except AlreadyExists as error:
            known = self._checked(self._cell.read().value)
            if replace(known, start=0, gone=0, announced=0, name=name) == wanted:
                return known
            raise AlreadyExists(
                f"The log has a cold tier already: segments in {known.store}, {known.partitions} partitions of events "
                f"in {known.events}. A log has one; use that."
            ) from error

    def announce(self, start: int) -> int:
        """Durably say that nothing below is to be needed any more: whoever puts a slot there later is refused.

        Returns the number of the announcement, to decide it by. An earlier one that is not decided yet never will be.
        """
        return self._cell.update(
            self._op(),
            lambda cold: replace(cold, start=max(start, cold.start), announced=cold.announced + 1),
        ).announced

    def decide(self, number: int, start: int) -> bool:
        """Durably say that of what was announced everything below ``start`` goes, and the rest stays.

        False, and nothing may go, if somebody else has announced something since.
        """

        def settle(cold: ColdTier) -> ColdTier:
            gone = max(start, cold.gone)
            return cold if cold.announced != number else replace(cold, start=gone, gone=gone)

        cold = self._cell.update(self._op(), settle)
        return cold.announced == number and cold.gone >= start

    def is_undecided(self) -> bool:
        """Whether something was announced that nobody has decided: whoever announced it may have died."""
        cold = self._cell.read().value
        return cold.start > cold.gone

    def _op(self) -> OpId:
        return OpId(self._chance.uuid())

    def _checked(self, cold: ColdTier) -> ColdTier:
        if cold.log_id != self._log_id:
            raise CorruptData(
                f"{self._cell.where} is of log {cold.log_id}, and {self._log_id} is there: restore what belongs to it."
            )
        return cold


def open_events(
    cold: ColdTier,
    *,
    create: bool,
    options: Mapping[str, str] | None = None,
    events_options: Mapping[str, Any] | None = None,
    clock: Clock = CLOCK,
) -> Topic:
    """The topic of a cold tier's events: ``kafka://host:port,host:port/topic``, or the address of a topic of logs."""
    refuse_credentials(cold.events, "give them by events_options (sasl.username, sasl.password)")
    parts = urlsplit(cold.events)
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if not parts.netloc or not topic:
            raise InvalidInput(f"{cold.events!r} names no topic of Kafka: write kafka://host:port/topic.")
        return KafkaTopic(parts.netloc, topic, cold.partitions, create=create, config=events_options, clock=clock)
    return open_object_topic(cold.events, cold.partitions, create=create, options=options, clock=clock)
