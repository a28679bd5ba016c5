"""Leadership of a primary in its term: checked before a write, after it, and before it is acknowledged."""

from __future__ import annotations

from typing import final

from strandline.errors import Fenced
from strandline.storage.lease import Lease


@final
class Leadership:
    """Held while this node is the primary of its term. Ends by itself when the lease expires, and never resumes.

    Without a lease only a higher term ends it.

    No I/O: a lease counts its time from before it was requested, so that no other node holds it at the same time.
    """

    def __init__(self, term: int, lease: Lease | None = None) -> None:
        self.term = term
        self._lease = lease
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """End it for good."""
        if self._ended is None:
            self._ended = why

    @property
    def is_held(self) -> bool:
        """Whether this node leads at this moment."""
        return self._ended is None and (self._lease is None or (self._lease.held() and self._lease.epoch == self.term))

    def check(self, what: str) -> None:
        """``Fenced`` unless this node leads now; ``what`` describes what happened to the write."""
        if self._ended is not None:
            raise Fenced(f"This node is not the primary any more ({self._ended}): {what}. Call the new primary.")
        if not self.is_held:
            raise Fenced(
                f"This node's lease of term {self.term} has run out, so that another node may be the primary: {what}. "
                "Find the primary, and call it."
            )
