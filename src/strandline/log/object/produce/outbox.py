"""Outbox: uploads batches in parallel, lists them strictly in order, keeps them after a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

from strandline.errors import ExpectationFailed
from strandline.log.contract import Receipt
from strandline.log.object.produce.handles import Outcome
from strandline.log.object.produce.shipper import Drafting, Sealed, Shipper
from strandline.log.object.produce.workers import Workers
from strandline.storage.clock import CLOCK


@dataclass(slots=True, eq=False)
class Sent:
    """A batch that was handed in: who waits for it, what it takes, and how far it has come."""

    outcome: Outcome
    size: int
    expect: int | None
    draft: Drafting | None
    sealed: Sealed[Any] | None = None
    number: int = -1
    uploaded: Future[Sealed[Any]] | None = None
    began: float = field(default_factory=CLOCK.monotonic)

    def done(self) -> bool:
        """Whether its upload has ended, well or badly."""
        return self.uploaded is not None and self.uploaded.done()

    def error(self) -> BaseException | None:
        """Why its upload, which has ended, failed."""
        return None if self.uploaded is None else self.uploaded.exception()


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of some batches: the first of them are listed, and the next one failed, or none did.

    ``crowded`` if others list at the same time.
    """

    receipts: list[Receipt]
    failure: BaseException | None
    crowded: bool = False


class Outbox:
    """One writer's batches in order. Its caller takes care that only one thread at a time uses it.

    Only :meth:`deliver` needs no such care, and blocks. A batch that expects an end of the log is under way alone: it
    waits for those before it, and those behind it have no number yet, because theirs depends on what becomes of it.
    """

    def __init__(self, shipper: Shipper[Any, Any], *, number: int, uploads: int, ready: Callable[[], None]) -> None:
        """Number batches from ``number`` on; ``ready`` is called when an upload has ended."""
        self.ready = ready
        self._shipper = shipper
        self._number = number
        self._halted = False
        self._sent: deque[Sent] = deque()
        self._waiting: deque[Sent] = deque()
        self._workers = Workers(uploads, "strandline-upload")

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    @property
    def last(self) -> Outcome | None:
        """The outcome of the newest batch that is under way."""
        newest = self._waiting or self._sent
        return newest[-1].outcome if newest else None

    @property
    def number(self) -> int:
        """The number of the oldest batch that is not listed."""
        return self._sent[0].number if self._sent else self._number

    def put(self, draft: Drafting, outcome: Outcome, expect: int | None = None) -> None:
        """Take a batch, and begin to upload it as soon as its number is known."""
        self._waiting.append(Sent(outcome, draft.size, expect, draft))
        self._pump()

    def _pump(self) -> None:
        while self._waiting and not self._halted:
            alone = self._waiting[0].expect is not None or (bool(self._sent) and self._sent[-1].expect is not None)
            if alone and self._sent:
                return
            sent = self._waiting.popleft()
            sent.number = self._number
            self._number += 1
            self._sent.append(sent)
            self._upload(sent)

    def _upload(self, sent: Sent) -> None:
        sent.uploaded = self._workers.submit(self._ship, sent)
        sent.uploaded.add_done_callback(lambda _: self.ready())

    def _ship(self, sent: Sent) -> Sealed[Any]:
        if sent.sealed is None:  # in this thread, because finishing a batch may take long
            sent.sealed = self._shipper.seal(sent.draft, number=sent.number, expect=sent.expect)
            sent.draft = None
        return self._shipper.upload(sent.sealed)

    # --- listing -----------------------------------------------------------------------------------------------

    def uploaded(self) -> list[Sent]:
        """The oldest batches, as far as their uploads have ended, well or badly."""
        return [] if self._halted else list(takewhile(Sent.done, self._sent))

    def deliver(self, batches: list[Sent]) -> Delivery:
        """List the oldest batches with one conditional write, up to the first whose upload failed. Blocks."""
        good = list(takewhile(lambda sent: sent.error() is None, batches))
        failure = batches[len(good)].error() if len(good) < len(batches) else None
        if not good:
            return Delivery([], failure)
        try:
            receipts = self._shipper.enlist([sent.uploaded.result() for sent in good if sent.uploaded])
            return Delivery(receipts, failure, self._shipper.crowded)
        except BaseException as error:  # noqa: BLE001 - every reason must reach those who wait
            return Delivery([], error)

    def take(self) -> Sent:
        """Remove the oldest batch, which is listed."""
        taken = self._sent.popleft()
        self._pump()
        return taken

    def take_refused(self, failure: BaseException | None) -> Sent | None:
        """Remove the oldest batch if all that failed is its expectation: then its number is free again."""
        if not isinstance(failure, ExpectationFailed) or self._sent[0].expect is None:
            return None
        taken = self._sent.popleft()
        self._number = taken.number
        self._pump()
        return taken

    # --- failing -----------------------------------------------------------------------------------------------

    def halt(self) -> None:
        """Keep everything, and begin nothing more until :meth:`resend`."""
        self._halted = True

    def outcomes(self) -> list[Outcome]:
        """Who waits, in order."""
        return [sent.outcome for sent in chain(self._sent, self._waiting)]

    def resend(self) -> list[Outcome]:
        """Go on with what was kept, under the same numbers; returns its new outcomes, in order.

        What was uploaded is not uploaded again: should its listing have landed, it is recognised.
        """
        self._halted = False
        for sent in chain(self._sent, self._waiting):
            sent.outcome = Outcome()
        for sent in self._sent:
            if sent.done() and sent.error() is not None:
                self._upload(sent)
        self._pump()
        return self.outcomes()

    def clear(self) -> None:
        """Forget everything, and begin nothing more."""
        self._halted = True
        for sent in self._sent:
            if sent.uploaded is not None:
                sent.uploaded.cancel()
        self._sent.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Let the threads end when nothing is left to upload; does not wait for them."""
        self._workers.close()

    def join(self) -> None:
        """Wait until they have ended."""
        self._workers.join()
