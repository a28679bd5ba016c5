"""Where a log's cold tier is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput

COLD_FILE: Final = "cold.json"
"""What it is called that says where the cold tier is, beside the log."""
COLD_FOLDER: Final = "cold"
"""Where segments are, beside the log, if nobody says."""


@dataclass(frozen=True, slots=True)
class ColdTier:
    """What ``cold.json`` beside a log says: where its segments are, and where their events."""

    log_id: UUID
    store: str
    """The address of the store with the segments."""
    events: str
    """The address of the topic with their events."""
    partitions: int
    """How many partitions that topic has."""
    name: str = ""
    """The log's name in the events."""
    start: int = 0
    """Nothing below may be needed from now on: what expiry announces before it looks who needs something."""
    gone: int = 0
    """What was decided to go: everything below it, for good. The rest of what was announced may yet stay."""
    announced: int = 0
    """How often something was announced: only who did it last may decide."""

    def __post_init__(self) -> None:
        if self.partitions < 1 or not 0 <= self.gone <= self.start or self.announced < 0:
            raise InvalidInput(f"A cold tier has a partition or more and begins at 0 or later, not so: {self}.")
        if not self.store or not self.events:
            raise InvalidInput("A cold tier needs the addresses of its store and of its events.")
