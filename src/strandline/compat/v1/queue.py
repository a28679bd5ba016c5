"""Consumer side of a version 1 queue: claim, list, acknowledge."""

from __future__ import annotations

from strandline.compat.v1 import edits
from strandline.compat.v1.log import QueueLog
from strandline.compat.v1.reading import QueueFetcher
from strandline.compat.v1.slots import SLOT
from strandline.errors import InvalidInput
from strandline.log.queue.contract import GivenBatches, PeekedBatches, Writes, keep_letter
from strandline.model.head import Descriptor, QueueEntry, QueueManifest


class V1Queue:
    """A queue of version 1 for queue consumers; see :class:`~strandline.log.queue.contract.Queue`.

    Dead letters go to ``<data>-dead/``, beside the data folder, which no trimmer reads.
    """

    def __init__(self, log: QueueLog) -> None:
        self._log = log
        self.url = log.url
        self.slot = SLOT
        self._cell = log.new_cell()
        self._trimmer = log.trimmer(remember=True)
        self._fetcher = QueueFetcher(log.store)
        self._epoch: int | None = None
        self._given = GivenBatches()

    def __repr__(self) -> str:
        return f"V1Queue({self._log!r})"

    def claim(self, holder: str, last_acked: int | None) -> int:
        """Become the only consumer; returns the next sequence to acknowledge.

        The format has no room for the holder: each claim is a new one and raises the epoch. Without ``last_acked`` the
        first listed batch is next, whatever its number. A ``last_acked`` ahead of an *empty* queue is accepted.
        """
        manifest = self._cell.update(lambda found: edits.claim(found, last_acked))
        self._epoch = manifest.epoch
        return edits.first_listed(manifest) if last_acked is None else last_acked + 1

    def _read(self) -> QueueManifest:
        manifest = self._cell.read()
        if self._epoch is not None:
            edits.check_epoch(manifest, self._epoch)
        self._given.check(self.url, manifest.next_sequence, lambda sequence: edits.entry_at(manifest, sequence))
        return manifest

    def peek(self, since: int, limit: int | None = None) -> PeekedBatches:
        """Consecutive listed batches from a sequence on; ``Fenced``, ``CursorExpired``."""
        manifest = self._read()
        found = edits.entries_from(manifest, since)[:limit]
        self._given.note(found)
        return PeekedBatches(found, len(manifest.entries))

    def between(self, first: int, last: int) -> tuple[QueueEntry, ...]:
        """The listed batches with sequences ``first`` through ``last``; ``Fenced``, ``CursorExpired``."""
        return edits.entries_from(self._read(), first)[: max(0, last + 1 - first)]

    def acknowledge(self, through: Descriptor) -> int:
        """Durably drop everything through this batch from the manifest, and return how many batches are left in it.

        ``Diverged`` if another one is in its place.
        """
        if self._epoch is None:
            raise InvalidInput("Only the consumer that claimed the queue may acknowledge.")
        epoch = self._epoch
        written = self._cell.update(
            lambda found: edits.acknowledge(found, epoch=epoch, through=through.sequence, location=through.location),
            role="consumer",
        )
        return len(written.entries)

    def fetcher(self) -> QueueFetcher:
        """The reader of the batches."""
        return self._fetcher

    def dead_letter(self, descriptor: Descriptor, reason: str) -> str:
        """Durably store an unreadable batch; returns its location. ``Fenced``."""
        self._read()  # a newer consumer may have passed a missing batch
        folder, now = f"{self._log.folder}-dead", self._log.env.clock.now()
        return keep_letter(self._log.store, folder, self._fetcher, descriptor, reason=reason, now=now)

    def trim(self, pause: float = 0.0) -> None:
        """One round of trimming; deletes only objects that it has seen unlisted for a grace period."""
        self._trimmer.run()

    def heartbeat(self) -> None:
        """None: such a queue has no idle limit."""

    def writes(self) -> Writes:
        """Conditional writes so far."""
        return self._cell.writes()
