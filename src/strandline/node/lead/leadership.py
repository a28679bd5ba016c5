"""The write gate of a primary: whether it is still the one, asked before a write, after it, and before it is told."""

from __future__ import annotations

from typing import final

from strandline.errors import Fenced
from strandline.storage.lease import Lease


@final
class Gate:
    """Open while this node is the primary of its term. Closes by itself when the lease runs out; never opens again.

    No I/O: a lease counts its time from before it was asked for, so that no other node holds it while this one does.
    """

    def __init__(self, term: int, lease: Lease | None = None) -> None:
        """A primary of this term, by this lease, which it holds; without one only a higher term closes the gate."""
        self.term = term
        self._lease = lease
        self._shut: str | None = None

    def shut(self, why: str) -> None:
        """Close it for good."""
        if self._shut is None:
            self._shut = why

    @property
    def is_open(self) -> bool:
        """Whether it is open at this moment."""
        return self._shut is None and (self._lease is None or (self._lease.held() and self._lease.epoch == self.term))

    def check(self, what: str) -> None:
        """``Fenced`` unless it is open at this moment; ``what`` says what became of the write."""
        if self._shut is not None:
            raise Fenced(f"This node is not the primary any more ({self._shut}): {what}. Ask the new primary.")
        if not self.is_open:
            raise Fenced(
                f"This node's lease of term {self.term} has run out, so that another node may be the primary: {what}. "
                "Find the primary, and ask there."
            )
