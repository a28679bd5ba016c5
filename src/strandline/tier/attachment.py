"""The cell beside a log that names its cold tier, and coordinates expiry with new slots.

A slot may be created at an offset that only the cold tier has while expiry is about to remove it. Both write before
they read: expiry announces its new start and then reads the slots; a slot is created and then the announcement is read.
In any order, one of the two sees the other.

A tierer that was replaced and does not know it may expire at the same time: it read the slots before the new slot
existed. So segments are deleted only after a decision, and only the last announcer can decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar, final
from uuid import UUID

import msgspec

from strandline.errors import AlreadyExists, CorruptData, InvalidInput, NotFound, UnsupportedVersion
from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.log.topic.contract import Topic
from strandline.log.topic.kafka import KafkaTopic
from strandline.log.topic.logs import open_object_topic
from strandline.model.addresses import refuse_credentials, split_address
from strandline.model.json_values import natural, read_record, stamp_fields
from strandline.model.segments import COLD_FILE, ColdTier
from strandline.model.stamp import OpId, Stamped
from strandline.storage.cell import StoreCell
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectStore

T = TypeVar("T")

FORMAT_VERSION: Final = 1


@final
@dataclass(frozen=True, slots=True)
class TierCellCodec(Generic[T]):
    """Stores a dataclass as a cell's content; damage is an error, never an empty cell."""

    kind: str
    content: type[T]
    optional: tuple[str, ...] = ()
    """Fields that older cells lack."""

    def encode(self, state: Stamped[T]) -> bytes:
        """The bytes of a state."""
        fields = {"min_reader": FORMAT_VERSION, **msgspec.to_builtins(state.value), **stamp_fields(state)}
        return encode_checked(self.kind, FORMAT_VERSION, fields)

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[T]:
        """The state in these bytes; ``CorruptData`` if they are damaged."""
        with damage(where, "Restore the object."):
            fields = decode_checked(bytes(data), self.kind, FORMAT_VERSION)
            if natural(fields["min_reader"]) > FORMAT_VERSION:
                raise UnsupportedVersion(f"{where} was written by a newer version of strandline: upgrade this one.")
            return read_record(Stamped, fields, value=read_record(self.content, fields, optional=self.optional))


COLD_CODEC: Final = TierCellCodec("strandline-cold", ColdTier)
PARTITIONS: Final = 8
"""Default number of partitions of an event topic."""


@final
class ColdCell:
    """The stored description of a log's cold tier. Thread-safe."""

    def __init__(self, place: ObjectStore, log_id: UUID, *, path: str = COLD_FILE, env: Env = SYSTEM) -> None:
        """The cell of the log in this store, in the object ``path``."""
        self._log_id = log_id
        self._chance = env.chance
        self._cell: StoreCell[ColdTier] = StoreCell(place, path, COLD_CODEC, env=env)

    def read(self) -> ColdTier | None:
        """The current description; None if the log has no cold tier."""
        try:
            return self._checked(self._cell.read().value)
        except NotFound:
            return None

    def attach(self, store: str, events: str, *, partitions: int = PARTITIONS, name: str = "") -> ColdTier:
        """Durably record where the cold tier is. Idempotent; ``AlreadyExists`` if it is elsewhere."""
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
        """Durably announce that offsets below ``start`` expire: later slots below it are refused.

        Returns the number to decide it by. It supersedes every undecided announcement.
        """
        return self._cell.update(
            self._op(),
            lambda cold: replace(cold, start=max(start, cold.start), announced=cold.announced + 1),
        ).announced

    def decide(self, number: int, start: int) -> bool:
        """Durably decide an announcement: offsets below ``start`` are deleted, the rest stays.

        False, and nothing may be deleted, if another tierer has announced since.
        """

        def settle(cold: ColdTier) -> ColdTier:
            gone = max(start, cold.gone)
            return cold if cold.announced != number else replace(cold, start=gone, gone=gone)

        cold = self._cell.update(self._op(), settle)
        return cold.announced == number and cold.gone >= start

    def is_undecided(self) -> bool:
        """Whether an announcement is undecided: its announcer may have crashed."""
        cold = self._cell.read().value
        return cold.start > cold.gone

    def _op(self) -> OpId:
        return OpId(self._chance.uuid())

    def _checked(self, cold: ColdTier) -> ColdTier:
        if cold.log_id != self._log_id:
            raise CorruptData(
                f"{self._cell.where} is of log {cold.log_id}, but this is log {self._log_id}: restore the right object."
            )
        return cold


@dataclass(frozen=True, slots=True)
class ColdAccess:
    """Connection settings of a cold tier: options of its stores, options of Kafka's client, and the clock."""

    options: Mapping[str, str] | None = field(default=None, repr=False)
    events_options: Mapping[str, Any] | None = field(default=None, repr=False)
    env: Env = SYSTEM


def open_events(cold: ColdTier, access: ColdAccess, *, create: bool) -> Topic:
    """The topic of a cold tier's events: ``kafka://host:port,host:port/topic``, or the address of a topic of logs."""
    refuse_credentials(
        cold.events, "give them by events_options, or by options of open (kafka.sasl.username, kafka.sasl.password)"
    )
    parts = split_address(cold.events)
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if not parts.netloc or not topic:
            raise InvalidInput(f"{cold.events!r} names no topic of Kafka: write kafka://host:port/topic.")
        return KafkaTopic(
            parts.netloc, topic, cold.partitions, create=create, config=access.events_options, env=access.env
        )
    return open_object_topic(cold.events, cold.partitions, create=create, options=access.options, env=access.env)
