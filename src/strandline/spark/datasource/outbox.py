"""Writes of Spark into nodes and write-ahead logs, through an outbox: an object log from which the driver moves them.

Executors cannot list batches in such a log together. So a job or micro-batch is listed in the outbox, all or nothing
and once, and then ingested into the target, once, too. A driver that dies in between leaves the rest in the outbox;
the same job, or the next commit, moves it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from strandline.errors import (
    AlreadyExists,
    Contended,
    Fenced,
    InvalidInput,
    OutOfOrder,
    StrandlineError,
    Unsupported,
)
from strandline.ingestion.api import ingest, open_target
from strandline.log.object import ObjectLog
from strandline.log.read.value_format import named_codec
from strandline.model.addresses import ParsedAddress
from strandline.opening import open_url
from strandline.spark.failures import retried
from strandline.spark.opening import security_of
from strandline.spark.write_options import WriteOptions
from strandline.storage.clock import CLOCK
from strandline.values.contract import Codec

SLOT: Final = "spark-outbox"
"""How the outbox's slot begins, which ends with the target's id: what is not in the target yet is not deleted."""
_TRIES: Final = 20
_PAUSE: Final = 0.5
_LOGGER: Final = logging.getLogger(__name__)


def needs_outbox(url: str) -> bool:
    """Whether executors cannot list batches in the log at this address."""
    place = ParsedAddress.of(url)
    return place.is_node or place.is_wal


@dataclass(frozen=True, slots=True)
class SparkOutbox:
    """The outbox of a write."""

    log: ObjectLog
    slot: str
    """Its slot."""
    codec: Codec | None
    """The format of the target's values."""


def open_outbox(options: WriteOptions) -> SparkOutbox:
    """The outbox of a write, maybe new; ``Unsupported`` without one, ``InvalidInput`` for that of another log."""
    if options.outbox is None:
        raise Unsupported(
            f"Executors cannot append to {options.url} together: name an object log through which the rows pass, with "
            ".option('outbox', 's3://bucket/outbox'). The driver moves them from there, each once."
        )
    if options.expect is not None:
        raise InvalidInput(f"expectedOffset is for object logs: other writers of {options.url} may come in between.")
    where, storage = options.outbox, options.storage or None
    log = retried(lambda: open_url(where, create=True, retention="consumed", options=storage))
    if not isinstance(log, ObjectLog):
        raise InvalidInput(f"The outbox {where} is no plain object log: name the address of a new one.")
    if log.value is not None:
        raise InvalidInput(f"The outbox {where} has typed values, and is another log: name the address of a new one.")
    target, codec = retried(lambda: _target(options))
    slot = slot_name(target)
    _bind(log, slot, options)
    return SparkOutbox(log, slot, codec)


def slot_name(target: UUID) -> str:
    """The slot of an outbox for this target."""
    return f"{SLOT}-{target}"


def _bind(outbox: ObjectLog, mine: str, options: WriteOptions) -> None:
    """Note the target in the outbox; ``InvalidInput`` if it has another one, to which all of its rows go."""
    with contextlib.suppress(AlreadyExists):
        # Of jobs that begin at once, the first one decides. The slot stays: others of the same target rely on it.
        retried(lambda: outbox.slots.create(mine, outbox.bounds().first, sole=SLOT))
    # By the head, which also names a slot whose creator died before it was written.
    other = next((name for name in retried(outbox.head).slots if name.startswith(SLOT) and name != mine), None)
    if other is not None:
        raise InvalidInput(
            f"The outbox {options.outbox} belongs to another log than {options.url} "
            f"(to {other.removeprefix(SLOT)[1:]}): name another outbox, since all of its rows go to one log. "
            "Nothing was written."
        )


def _target(options: WriteOptions) -> tuple[UUID, Codec | None]:
    """Id and format of the target, which a node does not say; a write-ahead log is created if there is none."""
    with open_target(options.url, **_access(options)) as target:
        try:
            return target.log_id, named_codec(target)
        except Unsupported:
            return target.log_id, None


def _access(options: WriteOptions) -> dict[str, Any]:
    return {} if ParsedAddress.of(options.url).is_wal else {"security": security_of(options.node)}


def forward(options: WriteOptions) -> None:
    """Move everything from the outbox into the target once, in order; ``OutOfOrder`` if others do so all the time."""
    outbox, access = open_outbox(options), _access(options)
    for left in reversed(range(_TRIES)):
        try:
            retried(lambda: ingest(outbox.log, options.url, slot=outbox.slot, target_options=access))
            break
        except (OutOfOrder, Fenced, Contended):  # the commit of another query moves it, too
            if not left:
                raise
            CLOCK.sleep(_PAUSE)
    try:
        outbox.log.trim()
    except StrandlineError as error:
        _LOGGER.warning("The outbox %s was not trimmed, and will be later: %s", options.outbox, error)
