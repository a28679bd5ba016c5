"""Limits of a producer: size and age of batches, parallel uploads, memory."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.errors import InvalidInput
from strandline.model.records import MAX_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """When batches are closed, how many are uploaded at a time, and when appenders wait."""

    batch_bytes: int = 64 << 20
    linger: float = 0.1
    budget: int = 256 << 20
    block: bool = True
    uploads: int = 8

    def __post_init__(self) -> None:
        least = min(self.batch_bytes, self.budget, self.uploads)
        if least < 1 or self.linger < 0 or self.batch_bytes > MAX_RECORD_BYTES:
            raise InvalidInput(
                "batch_bytes, budget and uploads must be at least 1, linger not negative, and batch_bytes at most "
                f"{MAX_RECORD_BYTES:,}."
            )
