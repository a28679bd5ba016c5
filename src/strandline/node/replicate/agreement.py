"""Log matching: the longest common prefix of two copies, found by the terms of their records. Pure."""

from __future__ import annotations

from typing import Protocol

from strandline.errors import Diverged
from strandline.model.cursor import Bounds, Cursor
from strandline.node.messages import Rewind


class Terms(Protocol):
    """The terms of a log's records. They never decrease along it."""

    def term_at(self, offset: int) -> int | None:
        """The term of a record; None if it is not retained."""

    def end_of_term(self, term: int) -> int:
        """The first offset with a record of a higher term; the end of the log if there is none."""


def agreement(since: Cursor, terms: Terms, bounds: Bounds, *, term: int) -> Rewind | None:
    """Where a replica at ``since`` diverges from the log of the only primary since ``term``; None if nowhere.

    Each term had one primary, which wrote in one order: two logs whose records at an offset are of the same term are
    equal up to there. ``Diverged`` if the replica has a record of the primary's own terms that the primary lacks: no
    failover explains that.
    """
    if since.next <= bounds.next:
        if not since.term or terms.term_at(since.next - 1) == since.term:
            return None
        if since.next <= bounds.first and since.term >= term:
            return None  # that record is not retained here, but only this primary wrote in this term
        upto = since.next
    else:
        upto = bounds.next
    if since.term >= term:
        raise Diverged(
            f"The replica is at {since.next} in term {since.term}, and has a record there that the primary, which has "
            f"led alone since term {term}, does not have: one of their disks lost or gained records, or the primary's "
            "folder was restored from an older copy. Promote the replica by force, or let it bootstrap again."
        )
    upto = max(bounds.first, min(upto, terms.end_of_term(since.term)))
    return Rewind(upto, terms.term_at(upto - 1) or 0)


def stepped_back(since: Cursor, answer: Rewind, terms: Terms, bounds: Bounds) -> Cursor | None:
    """The cursor that a replica asks for next after a rewind; None if it retains nothing that could match.

    Always before ``since``, so that the search ends.
    """
    upto = min(answer.upto, terms.end_of_term(answer.term))
    if upto >= since.next:
        raise Diverged(
            f"The primary asks to go back to {answer.upto} in term {answer.term}, and this replica is at {since.next} "
            "in that term: it has to bootstrap again."
        )
    if upto < bounds.first or (upto == bounds.first and bounds.first > 0):
        return None
    return Cursor(since.log_id, upto, terms.term_at(upto - 1) or 0)
