"""One writer of a log that is told what became of each append, or that it cannot be known."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from strandline.log.contract import Log, Receipt
from strandline.model.errors import (
    Contended,
    ExpectationFailed,
    OutcomeUnknown,
    StrandlineError,
    TransientStorageError,
    WriterExpired,
)
from strandline.model.head import WriterId
from strandline.storage.ambient import Chance, Clock
from strandline.storage.retry import Backoff

_RETRIES: Final = Backoff()


class LogWriter:
    """Appends to a log under an id of its own, each batch once. Used by one thread at a time."""

    def __init__(self, log: Log, *, clock: Clock, chance: Chance) -> None:
        """Append to ``log``. An id is taken with the first append."""
        self._log = log
        self._clock = clock
        self._chance = chance
        self._next: tuple[WriterId, int] | None = None

    def append(self, batch: pa.RecordBatch, expect: int | None) -> int:
        """Append a batch, whole or not at all; durable when this returns the offset of its first record.

        ``ExpectationFailed`` if the log does not end at ``expect``: nothing was appended, nor ever will be.
        ``OutcomeUnknown`` if the log failed for long, and may or may not have taken it. Other errors: it has not.
        """
        writer, number = self._take_id()
        doubt: StrandlineError | None = None
        for attempt in range(_RETRIES.attempts):
            try:
                # The same writer and number each time: if an earlier try landed, the log finds it and adds nothing.
                receipt = self._log.append(batch, writer=writer, number=number, expect=expect).result()
            except (TransientStorageError, OutcomeUnknown) as error:
                doubt = error
            except Contended:
                pass  # certainly nothing was appended by this try
            except ExpectationFailed:
                self._next = (writer, number)  # not even a try whose answer was lost can land: the log only grows
                raise
            except StrandlineError as error:
                if doubt is not None:
                    raise _unknown(error) from error
                if not isinstance(error, WriterExpired):
                    self._next = (writer, number)
                    raise
                writer, number = self._fresh_id()  # all that the old one did was answered: nothing hangs on its name
                continue
            else:
                self._next = (writer, number + 1)
                return _placed(receipt)
            self._clock.sleep(_RETRIES.pause(attempt, self._chance.jitter()))
        if doubt is not None:
            raise _unknown(doubt) from doubt
        self._next = (writer, number)
        raise Contended("The log was changed by others at each try; nothing was changed. Try again.")

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


def _placed(receipt: Receipt) -> int:
    if receipt.first is None:
        raise OutcomeUnknown("The change is stored, but the log no longer tells where: read the key for its version.")
    return receipt.first


def _unknown(error: StrandlineError) -> OutcomeUnknown:
    return OutcomeUnknown(
        "Whether the change was stored is unknown, since the log kept failing: read the key before you repeat it. "
        f"({error})"
    )
