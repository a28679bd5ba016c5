"""What verifying a log may find, whichever log it is."""

from __future__ import annotations

from enum import StrEnum


class Severity(StrEnum):
    """What a finding means."""

    DAMAGE = "damage"
    """Something that was acknowledged is lost or wrong, a promise is broken, or the log cannot be opened."""
    WASTE = "waste"
    """Something takes up room that nobody needs."""
    NOTE = "note"
    """Something that is as it should be or is put right by itself, and that somebody may want to know."""
