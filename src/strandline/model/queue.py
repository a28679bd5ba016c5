"""Queues as values: the descriptors that a consumer is handed, and the manifest that version 1 shares with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from strandline.model.cursor import batch_fingerprint
from strandline.model.head import MetadataRange


@runtime_checkable
class Descriptor(Protocol):
    """One listed batch: enough to fetch it anywhere, at any time while its object exists.

    A plain value: picklable, and equal to every other descriptor of the same batch. An own log's
    :class:`~strandline.model.head.Entry` is one, and so is a :class:`QueueEntry`.
    """

    @property
    def sequence(self) -> int:
        """The batch's place in the order of listing; dense."""

    @property
    def location(self) -> str:
        """The path of its object in the store."""

    @property
    def metadata(self) -> Sequence[MetadataRange]:
        """What each ``produce`` call attached to its records."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A batch that is listed in a queue manifest of version 1, which knows neither counts nor sizes."""

    sequence: int
    location: str
    metadata: Sequence[MetadataRange] = ()

    @property
    def fingerprint(self) -> int:
        """Tells it from every other batch that could be listed with its sequence."""
        return batch_fingerprint(self.location, self.sequence)


@dataclass(frozen=True, slots=True)
class QueueManifest:
    """The whole manifest of a queue of version 1: what is listed and not acknowledged, and who may acknowledge."""

    entries: tuple[QueueEntry, ...] = ()
    next_sequence: int = 0
    epoch: int = 0
