"""Numbered writers: the rules, the same for every log that remembers them, and a writer that applies them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    CommitTimedOut,
    Contended,
    ExpectationFailed,
    InvalidInput,
    OutcomeUnknown,
    OutOfOrder,
    Overloaded,
    StrandlineError,
    TransientStorageError,
    WriterExpired,
)
from strandline.log.contract import Log
from strandline.log.writers.source import (
    advance_of,
    check_source_number,
    is_client,
    is_positioned,
    is_source,
    remembered,
)
from strandline.model.arguments import shown, whole
from strandline.model.head import Receipt, WriterId, WriterState, proof_of
from strandline.storage.env import Env
from strandline.storage.retry import Backoff

MAX_WRITERS: Final = 512
"""Number of writers that a log remembers; those that were silent longest are forgotten first."""

MAX_SOURCES: Final = 256
"""Number of these that may be sources of ingested records, which are never forgotten."""


def numbered(writer: WriterId | None, number: int | None) -> tuple[WriterId, int] | None:
    """Writer and number of an append; None for an unnumbered append. One without the other is refused.

    >>> numbered(None, None) is None
    True
    >>> numbered(None, 7)
    Traceback (most recent call last):
    strandline.errors.InvalidInput: A numbered append has a writer and a number: pass both, or neither.
    """
    if (writer is None) != (number is None):
        raise InvalidInput("A numbered append has a writer and a number: pass both, or neither.")
    if writer is None or number is None:
        return None
    if not isinstance(writer, UUID):
        raise InvalidInput(f"A writer is a WriterId, which is a UUID, not {shown(writer)}.")
    checked = int(whole().check(number, "The number of an append"))
    check_source_number(writer, checked)
    return writer, checked


def is_repeated(writer: WriterId, number: int, last: WriterState | None) -> bool:
    """Whether the log has this append already, by the writer's ``last`` one: then appending it again adds nothing.

    ``OutOfOrder`` if another append of the same client took the number: several servers may number its appends.
    """
    _, upto = remembered(writer, number)
    if last is None or upto > last.number:
        return False
    if is_client(writer) and (upto, proof_of(writer)) != (last.number, last.proof):
        raise OutOfOrder(
            f"Append number {number} of client {writer} is in the log already, with another epoch or sequence: another "
            "server has appended for it meanwhile. Nothing was appended: read its last append again."
        )
    return True


def check_number(
    writer: WriterId,
    number: int,
    last: WriterState | None,
    *,
    known: Iterable[WriterId],
    forgotten: bool = False,
) -> None:
    """Refuse a number that does not follow the writer's last one, and an unknown writer that is not new.

    ``known`` are all writers that the log remembers. ``forgotten``: the log may have known this writer, even if it
    begins with its first number.
    """
    if is_positioned(writer):
        _check_position(writer, number, last, known)
    elif last is None:
        if number > 0 or forgotten:
            raise WriterExpired(
                f"The log does not know writer {writer} (number {number}): it was silent for too long, and "
                "the outcome of its last append is unknown. Check the log's end, then continue with a new producer."
            )
    elif number != last.number + 1:
        raise OutOfOrder(
            f"Writer {writer} lists number {number}, but its last listed number is {last.number}: "
            f"append number {last.number + 1} first."
        )


def _check_position(writer: WriterId, number: int, last: WriterState | None, known: Iterable[WriterId]) -> None:
    """Refuse an append from a source that does not begin where the last one ended; the first begins anywhere.

    That of a client is its append number 0: one with a higher number was known, and is forgotten.
    """
    if last is None:
        if is_client(writer) and number:
            raise WriterExpired(
                f"The log does not know client {writer} (number {number}): it was silent for too long, and the outcome "
                "of its last append is unknown. Check the log's end, then let the client begin a new epoch."
            )
        if is_source(writer) and sum(map(is_source, known)) >= MAX_SOURCES:
            raise InvalidInput(
                f"The log remembers the positions of {MAX_SOURCES} sources, and cannot take records of another one: "
                "append under a name that it knows (an ingested source, the writer of a Spark stream, a series of "
                "jobs), append to another log, or forget a source that has ended (strandline sources, of object logs)."
            )
    elif number != last.number:
        raise OutOfOrder(
            f"The append holds positions {number} up to {number + advance_of(writer)} of its source, and the log has "
            f"all of it below {last.number}: another ingest appends it, too, or the log lost its end. Nothing was "
            "appended. Start the ingest again."
        )


def forget_silent(writers: dict[WriterId, WriterState]) -> int:
    """Forget writers beyond the limit; returns one past the last sequence of any forgotten one, else 0.

    Sources are never forgotten: an ingest that did not find its position would append everything again.
    """
    floor = 0
    while len(writers) > MAX_WRITERS:
        silent = min(writers, key=lambda known: (is_source(known), writers[known].sequence))
        floor = max(floor, writers.pop(silent).sequence + 1)
    return floor


_IN_DOUBT: Final = (TransientStorageError, OutcomeUnknown, CommitTimedOut)
"""After these errors the batch may be in the log, or arrive later."""

_NUMBER_IS_FREE: Final = (Contended, ExpectationFailed, InvalidInput, Overloaded)
"""After these errors nothing was or will be appended: the next batch takes the same number."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The log refused the batch: nothing was appended."""

    error: StrandlineError


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The log failed, and the batch may or may not be in it; ``error`` is the last error."""

    error: StrandlineError


AppendOutcome: TypeAlias = Receipt | Refused | InDoubt


@dataclass(slots=True)
class NumberedWriter:
    """Appends to a log under a writer id of its own, each batch once. Used by one thread at a time."""

    log: Log
    env: Env
    retries: Backoff = field(default_factory=Backoff)
    _next: tuple[WriterId, int] | None = None
    """The id and number of the next append. The first append takes an id."""

    def append(self, batch: pa.RecordBatch, expect: int | None = None) -> AppendOutcome:
        """Append a batch, whole or not at all; durable if the outcome is a receipt. Retries where that is safe.

        ``ExpectationFailed`` is always a refusal: the log only grows, so that not even a try with a lost answer can
        still land. ``CommitTimedOut`` is not retried: the caller has waited for as long as the policy allows.
        """
        writer, number = self._take_id()
        in_doubt, attempt = False, 0
        while True:
            try:
                # The same writer and number each time: if an earlier try landed, the log recognises it and adds
                # nothing.
                receipt = self.log.append(batch, writer=writer, number=number, expect=expect).result()
            except StrandlineError as error:
                in_doubt = (in_doubt or isinstance(error, _IN_DOUBT)) and not isinstance(error, ExpectationFailed)
                failure = error
            else:
                self._next = (writer, number + 1)
                return receipt
            attempt += 1
            expired = isinstance(failure, WriterExpired) and not in_doubt
            may_help = failure.retryable or isinstance(failure, OutcomeUnknown)
            if attempt >= self.retries.attempts or not (
                expired or (may_help and not isinstance(failure, CommitTimedOut))
            ):
                break
            if expired:
                writer, number = self._fresh_id()  # all its appends were answered: the old id is not needed
            else:
                self.env.clock.sleep(self.retries.pause(attempt - 1, self.env.chance.jitter()))
        if in_doubt:
            return InDoubt(failure)
        if isinstance(failure, _NUMBER_IS_FREE):
            self._next = (writer, number)
        return Refused(failure)

    def _take_id(self) -> tuple[WriterId, int]:
        """The id and number of the next append, reserved until its outcome is known, and given up if it never is.

        A number with an unknown outcome may be listed, now or later: another batch under it could
        count as a repetition, and be lost. Nor is the old batch appended again before the next: that might restore a
        value long after its caller got the error, and after others have replaced it.
        """
        lent, self._next = self._next, None
        return lent or self._fresh_id()

    def _fresh_id(self) -> tuple[WriterId, int]:
        return WriterId(self.env.chance.uuid()), 0
