"""Divergence of a replica from its primary: the end of the common prefix, and the local tail behind it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from strandline.errors import Diverged
from strandline.log.wal.read.reading import WalReading
from strandline.model.cursor import Bounds, Cursor
from strandline.node.messages import Rewind, Topology

if TYPE_CHECKING:
    from strandline.node.replicate.log_copy import LogCopy

_LOGGER = logging.getLogger(__name__)


def agreement(since: Cursor, log: WalReading, bounds: Bounds, *, term: int) -> Rewind | None:
    """Where a replica at ``since`` diverges from the log of the only primary since ``term``; None if nowhere.

    Each term had one primary, which wrote in one order: two logs whose records at an offset are of the same term are
    equal up to there. ``Diverged`` if the replica has a record of the primary's own terms that the primary lacks: a
    failover cannot cause that.
    """
    if since.next <= bounds.next:
        if not since.term or log.term_at(since.next - 1) == since.term:
            return None
        if since.next <= bounds.first and since.term >= term:
            return None  # that record is not retained here, but only this primary wrote in this term
        upto = since.next
    else:
        upto = bounds.next
    if since.term >= term:
        raise Diverged(
            f"The replica has a record before {since.next} in term {since.term} that the primary, which has led alone "
            f"since term {term}, does not have: one of their disks lost or gained records, or the primary's folder "
            "was restored from an older copy. Promote the replica by force, or let it bootstrap again."
        )
    upto = max(bounds.first, min(upto, log.end_of_term(since.term)))
    return Rewind(upto, log.term_at(upto - 1) or 0)


def stepped_back(since: Cursor, answer: Rewind, log: WalReading, bounds: Bounds) -> Cursor | None:
    """The cursor that a replica asks for next after a rewind; None if it retains nothing that could match.

    Always before ``since``, so that the search ends.
    """
    upto = min(answer.upto, log.end_of_term(answer.term))
    if upto >= since.next:
        raise Diverged(
            f"The primary asks to rewind to {answer.upto} in term {answer.term}, but this replica is at {since.next} "
            "in that term: it has to bootstrap again."
        )
    if upto < bounds.first or (upto == bounds.first and bounds.first > 0):
        return None
    return Cursor(since.log_id, upto, log.term_at(upto - 1) or 0)


def check_uncommitted(first: int, committed: int) -> None:
    """``Diverged`` if committed records are among those from ``first`` on, which are to be discarded."""
    if first < committed:
        raise Diverged(
            f"The primary's log diverges from this replica's at offset {first}, but everything below {committed} was "
            "committed: nothing was discarded. One of the two nodes belongs to another log, or lost records."
        )


def check_replaceable(copy: LogCopy, topology: Topology, committed: int) -> None:
    """``Diverged`` if the copy, which a bootstrap is to replace, has committed what the primary has not."""
    # From the start of its term on, the primary has only records of that term.
    if copy.end().term < topology.term and topology.term_start < copy.log.bounds().extent:
        check_uncommitted(topology.term_start, committed)


def keep_tail(copy: LogCopy, topology: Topology, committed: int, name: str) -> None:
    """Copy the records that the primary may never have had into quarantine, before the copy is replaced.

    The primary has everything that was committed, and all records of its own term.
    """
    if copy.end().term >= topology.term:
        return
    bounds = copy.log.bounds()
    first = max(bounds.first, min(committed, topology.term_start))
    if first < bounds.next:
        _LOGGER.warning(
            "Replica %s has %d records from offset %d on that the primary may never have had; they are in %s.",
            name, bounds.next - first, first, copy.copy_tail(first),
        )  # fmt: skip


def truncate_tail(copy: LogCopy, to: int, committed: int, name: str) -> None:
    """Truncate the copy at ``to``, and move the records behind it into quarantine; ``Diverged`` if one is committed."""
    end = copy.log.bounds().next
    check_uncommitted(to, committed)
    aside = copy.rewind(to)
    _LOGGER.warning(
        "Replica %s had %d records that the primary never had, from offset %d on; they are in %s.",
        name, end - to, to, aside,
    )  # fmt: skip


def drop_uncommitted_seal(copy: LogCopy, topology: Topology, committed: int, name: str) -> None:
    """Take the copy's seal back if the primary's log was not sealed there; ``Diverged`` if it was committed."""
    bounds = copy.log.bounds()
    if bounds.sealed and not (topology.sealed and topology.durable == bounds.extent):
        check_uncommitted(bounds.next, committed)
        copy.unseal()
        _LOGGER.warning(
            "Replica %s had sealed the log at offset %d, and its primary never had: the seal was taken back.",
            name, bounds.next,
        )  # fmt: skip
