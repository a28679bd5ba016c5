"""Opens a consumer's queue at an address, a log or a queue; and the collector in its background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
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
"""Where a consumer is opened: an address, an opened log or queue, or any object with the contract of queues."""

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
                "A queue of version 1 has one slot, which begins with the listed batches: it takes neither "
                f"slot={slot!r} nor start={start!r}. Pass last_acked to begin elsewhere."
            )
        return V1Queue(place)
    if not isinstance(place, Queue):
        raise InvalidInput(
            f"Consumer: place is an address, an opened object log or a queue, not {shown(place)}: any other log "
            "is read with strandline.follow."
        )
    return place


_LOGGER: Final = logging.getLogger(__name__)

_PATIENCE: Final = 10.0
"""Seconds that stopping waits for a running round."""


class BackgroundCollector:
    """Calls ``collect`` every so many seconds from a daemon thread, until it is stopped.

    A failed round is logged, and the next one follows in time: the consumer is not affected. The queue decides
    what is collected; a round that the end of the process interrupts leaves a consistent state.
    """

    def __init__(self, collect: Callable[[], None], *, every: float, clock: Clock, name: str) -> None:
        """Start the thread; the first round follows after ``every`` seconds."""
        self._stop = threading.Event()
        # The thread refers neither to this object nor to the consumer: both can be garbage-collected unclosed.
        arguments = (collect, every, clock, name, self._stop)
        self._thread = threading.Thread(target=_run, args=arguments, name="strandline-collector", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.is_alive()

    def halt(self) -> None:
        """Start no further round; does not wait."""
        self._stop.set()

    def stop(self) -> None:
        """Start no further round, and wait briefly for a running one."""
        self._stop.set()
        self._thread.join(_PATIENCE)


def _run(collect: Callable[[], None], every: float, clock: Clock, name: str, stop: threading.Event) -> None:
    while not clock.wait(stop, every):
        try:
            collect()
        except Exception as error:  # noqa: BLE001 - the next round may succeed
            _LOGGER.warning("Collecting %s failed, and is tried again in %g s: %s", name, every, error)
