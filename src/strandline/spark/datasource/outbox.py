"""Writes of Spark into nodes and write-ahead logs, through an outbox: an object log from which the driver moves them.

Executors cannot list batches in such a log together. So a job or micro-batch is listed in the outbox, all or nothing
and once, and then ingested into the target, once, too. A driver that dies in between leaves the rest in the outbox;
the same job, or the next commit, moves it.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from strandline.errors import Contended, Fenced, InvalidInput, OutOfOrder, StrandlineError, Unsupported
from strandline.ingestion.api import ingest
from strandline.log.object import ObjectLog
from strandline.opening import open_url
from strandline.spark.failures import retried
from strandline.spark.opening import security_of
from strandline.spark.write_options import WriteOptions
from strandline.storage.clock import CLOCK

SLOT: Final = "spark-outbox"
"""The outbox's slot: what is not in the target yet is not deleted."""
_TRIES: Final = 20
_PAUSE: Final = 0.5
_LOGGER: Final = logging.getLogger(__name__)


def needs_outbox(url: str) -> bool:
    """Whether executors cannot list batches in the log at this address."""
    return url.startswith(("grpc:", "grpc+tls:", "wal:"))


def outbox_log(options: WriteOptions) -> ObjectLog:
    """The outbox of a write, created if there is none; ``Unsupported`` without the option that names it."""
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
    return log


def forward(options: WriteOptions) -> None:
    """Move everything from the outbox into the target, in order and once; then let the outbox delete it.

    ``OutOfOrder`` if others move the same outbox all the time.
    """
    outbox = outbox_log(options)
    target: dict[str, Any] = {} if options.url.startswith("wal:") else {"security": security_of(options.node)}
    for left in reversed(range(_TRIES)):
        try:
            retried(lambda: ingest(outbox, options.url, slot=SLOT, target_options=target))
            break
        except (OutOfOrder, Fenced, Contended):  # the commit of another query moves it, too
            if not left:
                raise
            CLOCK.sleep(_PAUSE)
    try:
        outbox.trim()
    except StrandlineError as error:
        _LOGGER.warning("The outbox %s was not trimmed, and will be later: %s", options.outbox, error)
