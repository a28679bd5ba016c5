"""Finished batches on their way: uploaded side by side, listed strictly in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

from strandline.log.contract import Receipt
from strandline.log.object.handles import Outcome
from strandline.log.object.upload import Draft, Lister, Sealed, seal
from strandline.model.head import WriterId


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch that was handed in: who waits for it, its encoded size, and its upload."""

    outcome: Outcome
    size: int
    uploaded: Future[Sealed]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of some batches: the first of them are listed, and the next one failed, or none did."""

    receipts: list[Receipt]
    failure: BaseException | None


class Outbox:
    """One writer's batches in order. Its caller takes care that only one thread at a time puts, takes or clears."""

    def __init__(
        self,
        lister: Lister,
        *,
        writer: WriterId,
        born: int,
        number: int,
        generation: int,
        uploads: int,
        wake: Callable[[], None],
    ) -> None:
        """Number batches from ``number`` on; ``wake`` is called when an upload has ended."""
        self._lister = lister
        self._writer = writer
        self._born = born
        self._number = number
        self._generation = generation
        self._wake = wake
        self._sent: deque[Sent] = deque()
        self._pool = ThreadPoolExecutor(uploads, thread_name_prefix="strandline-upload")

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def last(self) -> Outcome | None:
        """The outcome of the newest batch that is under way."""
        return self._sent[-1].outcome if self._sent else None

    def put(self, draft: Draft, outcome: Outcome) -> None:
        """Number a batch and begin to upload it."""
        sealed = seal(draft, writer=self._writer, number=self._number, born=self._born)
        self._number += 1
        uploaded = self._pool.submit(self._lister.upload, sealed, self._generation)
        self._sent.append(Sent(outcome, draft.size, uploaded))
        uploaded.add_done_callback(lambda _: self._wake())

    def uploaded(self) -> list[Sent]:
        """The oldest batches, as far as their uploads have ended, well or badly."""
        return list(takewhile(lambda sent: sent.uploaded.done(), self._sent))

    def deliver(self, batches: list[Sent]) -> Delivery:
        """List the oldest batches with one conditional write, up to the first whose upload failed. Blocks."""
        good = list(takewhile(lambda sent: sent.uploaded.exception() is None, batches))
        failure = batches[len(good)].uploaded.exception() if len(good) < len(batches) else None
        if not good:
            return Delivery([], failure)
        try:
            return Delivery(self._lister.enlist([sent.uploaded.result() for sent in good]), failure)
        except BaseException as error:  # noqa: BLE001 - every reason must reach those who wait
            return Delivery([], error)

    def take(self) -> Sent:
        """Remove the oldest batch."""
        return self._sent.popleft()

    def clear(self) -> list[Sent]:
        """Remove all batches."""
        sent = list(self._sent)
        self._sent.clear()
        return sent

    def close(self) -> None:
        """Wait for the uploads under way."""
        self._pool.shutdown(wait=True)
