"""Idempotent writer: appends each batch to a log exactly once, under one writer id and increasing numbers.

A batch whose answer was lost is appended again under the same number, which the log recognises. The id is given up
when the outcome of an append stays unknown, and when the log has forgotten it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from strandline.errors import (
    CommitTimedOut,
    Contended,
    ExpectationFailed,
    InvalidInput,
    OutcomeUnknown,
    Overloaded,
    StrandlineError,
    TransientStorageError,
    WriterExpired,
)
from strandline.log.contract import Log, Receipt
from strandline.model.head import WriterId
from strandline.storage.clock import Chance, Clock
from strandline.storage.retry import Backoff

_IN_DOUBT: Final = (TransientStorageError, OutcomeUnknown, CommitTimedOut)
"""After these the batch may be in the log, or get there later."""

_NUMBER_IS_FREE: Final = (Contended, ExpectationFailed, InvalidInput, Overloaded)
"""After these nothing was appended, nor will be: the next batch takes the same number."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The log refused the batch: nothing was appended."""

    error: StrandlineError


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The log failed, and the batch may or may not be in it; ``error`` is what it raised last."""

    error: StrandlineError


Outcome: TypeAlias = Receipt | Refused | InDoubt


class NumberedWriter:
    """Appends to a log under a writer id of its own, each batch once. Used by one thread at a time."""

    def __init__(self, log: Log, *, clock: Clock, chance: Chance, retries: Backoff | None = None) -> None:
        """Append to ``log``. An id is taken with the first append."""
        self._log = log
        self._clock = clock
        self._chance = chance
        self._retries = retries or Backoff()
        self._next: tuple[WriterId, int] | None = None

    def append(self, batch: pa.RecordBatch, expect: int | None = None) -> Outcome:
        """Append a batch, whole or not at all; durable if the outcome is a receipt. Repeats what may be repeated.

        ``ExpectationFailed`` is always a refusal: the log only grows, so that not even a try whose answer was lost can
        still land. ``CommitTimedOut`` is not repeated: the caller has waited for as long as the policy allows.
        """
        writer, number = self._take_id()
        in_doubt, attempt = False, 0
        while True:
            try:
                # The same writer and number each time: if an earlier try landed, the log finds it and adds nothing.
                receipt = self._log.append(batch, writer=writer, number=number, expect=expect).result()
            except StrandlineError as error:
                in_doubt = (in_doubt or isinstance(error, _IN_DOUBT)) and not isinstance(error, ExpectationFailed)
                failure = error
            else:
                self._next = (writer, number + 1)
                return receipt
            attempt += 1
            expired = isinstance(failure, WriterExpired) and not in_doubt
            if attempt >= self._retries.attempts or not (expired or _may_be_repeated(failure)):
                break
            if expired:
                writer, number = self._fresh_id()  # each of its appends was answered: nothing hangs on the old id
            else:
                self._clock.sleep(self._retries.pause(attempt - 1, self._chance.jitter()))
        if in_doubt:
            return InDoubt(failure)
        if isinstance(failure, _NUMBER_IS_FREE):
            self._next = (writer, number)
        return Refused(failure)

    def _take_id(self) -> tuple[WriterId, int]:
        """The id and number of the next append, lent until its outcome is known, and given up if it never is.

        Under a number whose outcome is unknown something may be listed, now or later: another batch under it could
        be taken for that, and lost. Nor is the old batch appended again before the next: that might bring a value
        back, long after its caller was told, that others have replaced since.
        """
        lent, self._next = self._next, None
        return lent or self._fresh_id()

    def _fresh_id(self) -> tuple[WriterId, int]:
        return WriterId(self._chance.uuid()), 0


def _may_be_repeated(error: StrandlineError) -> bool:
    return (error.retryable or isinstance(error, OutcomeUnknown)) and not isinstance(error, CommitTimedOut)
