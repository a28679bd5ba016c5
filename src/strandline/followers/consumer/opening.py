"""Opens the queue of a consumer from an address, a log or a queue."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Final, Literal, TypeAlias

from strandline.compat.v1.log import SLOT, QueueLog, open_queue
from strandline.compat.v1.queue import V1Queue
from strandline.errors import InvalidInput
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.queue.contract import Queue
from strandline.log.queue.log_queue import OwnQueue
from strandline.model.addresses import Address
from strandline.model.arguments import shown
from strandline.model.cursor import Start
from strandline.storage.clock import Chance, Clock

Place: TypeAlias = Address | ObjectLog | QueueLog | Queue
"""What a consumer is opened on: an address, an opened log or queue, or whatever keeps the contract of queues."""

Format = Literal["queue-v1"]

DEFAULT_SLOT: Final = "default"


def queue_at(
    place: Place,
    *,
    slot: str,
    start: Start,
    format: Format | None,  # noqa: A002 - as in open
    manifest: str,
    data: str,
    options: Mapping[str, str] | None,
    clock: Clock,
    chance: Chance,
) -> Queue:
    """The queue at an address, of an opened log, or the given one. Nothing is claimed yet."""
    if isinstance(place, str | PathLike):
        if format is None:
            place = open_log(place, options=options, clock=clock, chance=chance)
        else:
            place = open_queue(place, manifest=manifest, data=data, options=options, clock=clock, chance=chance)
    if isinstance(place, ObjectLog):
        return OwnQueue(place, slot, start=start)
    if isinstance(place, QueueLog):
        if slot not in (DEFAULT_SLOT, SLOT) or start != "retained":
            raise InvalidInput(
                f"A queue of version 1 has one slot, which begins with what is listed: it takes neither slot={slot!r} "
                f"nor start={start!r}. Pass last_acked to begin elsewhere."
            )
        return V1Queue(place)
    if not isinstance(place, Queue):
        raise InvalidInput(f"Consumer: place is an address, an opened log or a queue, not {shown(place)}.")
    return place
