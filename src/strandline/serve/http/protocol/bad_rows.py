"""The error for one record of a body, which callers are told by its row, its field and the reason."""

from __future__ import annotations

from strandline.errors import StrandlineError


class BadRow(StrandlineError):
    """A record of a body is wrong; nothing was appended. ``row`` counts from 0."""

    def __init__(self, message: str, row: int, field: str | None, reason: str) -> None:
        """``field`` is None if the reason names none."""
        super().__init__(message)
        self.row, self.field, self.reason = row, field, reason
