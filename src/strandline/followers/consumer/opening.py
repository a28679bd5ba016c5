"""Opens a consumer's queue at an address, a log or a queue."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from typing import Final, TypeAlias, cast

from strandline.compat.v1.log import NamedFormat, QueueLog, open_format
from strandline.compat.v1.queue import V1Queue
from strandline.compat.v1.slots import SLOT
from strandline.errors import InvalidInput
from strandline.lazy_names import open_address
from strandline.log.contract import READING, Log, LogReading, require
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.queue.contract import Queue
from strandline.log.queue.log_queue import ObjectLogQueue
from strandline.log.queue.slot_queue import SlotQueue, no_letters
from strandline.model.addresses import Address, ParsedAddress
from strandline.model.cursor import Start
from strandline.storage.closing import Closing
from strandline.storage.env import Env
from strandline.storage.objects.urls import open_store

ConsumerSource: TypeAlias = Address | LogReading | QueueLog | Queue
"""Where a consumer is opened: an address, an opened log or queue, or any object with the contract of queues."""

DEFAULT_SLOT: Final = "default"


def queue_at(
    source: ConsumerSource,
    *,
    slot: str,
    start: Start,
    format: NamedFormat | None,  # noqa: A002 - as in open
    dead_letters: Address | None,
    sets_aside: bool,
    options: Mapping[str, str] | None,
    env: Env,
) -> tuple[Queue, Closing | None]:
    """The queue at an address, of an opened log, or the given one; and what was opened for it. Nothing is claimed yet.

    An object log at an address is read without its cold tier: while the slot is held, its batches are retained. One
    that was opened with its cold tier is read across both.
    """
    opened: Closing | None = None
    log: object = source
    if isinstance(source, str | PathLike):
        if format is not None:
            log = open_format(source, format, options=options, env=env)
        else:
            place = ParsedAddress.of(source)
            log = open_address(source) if place.is_node or place.is_wal else open_log(source, options=options, env=env)
        opened = log if isinstance(log, Closing) and not isinstance(log, ObjectLog) else None
    if dead_letters is not None and isinstance(log, ObjectLog | QueueLog | Queue):
        raise InvalidInput("dead_letters= is for a log without an object store: this one keeps them in its own.")
    if isinstance(log, ObjectLog):
        return ObjectLogQueue(log, slot, start=start), None
    if isinstance(log, QueueLog):
        if slot not in (DEFAULT_SLOT, SLOT) or start != "retained":
            raise InvalidInput(
                "A queue of version 1 has one slot, which begins with the listed batches: it takes neither "
                f"slot={slot!r} nor start={start!r}. Pass last_acked to begin elsewhere."
            )
        return V1Queue(log), None
    if isinstance(log, Queue):
        return log, None
    with ExitStack() as closing:
        if opened is not None:
            closing.enter_context(opened)
        require(log, "consumed", *READING, slots=True)
        url = getattr(log, "url", None) or repr(log)
        hot = getattr(log, "hot", None)  # of a log over two tiers
        letters = hot.store if isinstance(hot, ObjectLog) else None
        if dead_letters is not None:
            letters = open_store(dead_letters, options)
        if sets_aside and letters is None:
            raise InvalidInput(no_letters(url))
        queue = SlotQueue(cast("Log", log), slot, start=start, url=url, letters=letters, env=env)
        closing.pop_all()
    return queue, opened
