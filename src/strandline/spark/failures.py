"""Failure classification: which are retryable, and which Strandline error caused a Spark error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeVar

from strandline import errors
from strandline.errors import StrandlineError
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.retry import Backoff

R = TypeVar("R")

PATIENCE: Final = Backoff(attempts=6, base=0.5, ceiling=8.0)
"""On top of the store's own retries: a query that ends has to be restarted by its user."""

_OURS = re.compile(r"strandline\.errors\.(\w+): ([^\n]*)")


def retried(
    action: Callable[[], R], *, backoff: Backoff | None = None, clock: Clock = CLOCK, chance: Chance = CHANCE
) -> R:
    """Run the action; retryable failures are retried a bounded number of times."""
    bound, attempt = backoff or PATIENCE, 0
    while True:
        try:
            return action()
        except StrandlineError as error:
            attempt += 1
            if not error.retryable or attempt >= bound.attempts:
                raise
            clock.sleep(bound.pause(attempt - 1, chance.jitter()))


def unwrapped(error: BaseException) -> BaseException:
    r"""The Strandline error that ended a Spark job or query, if its text has one; else the error itself.

    Spark passes on an error of a Python worker as the text of its traceback.

    >>> unwrapped(RuntimeError("... strandline.errors.Fenced: Slot 'a' is held by 'b'.\n at org.apache..."))
    Fenced("Slot 'a' is held by 'b'.")
    """
    if isinstance(error, StrandlineError):
        return error
    found = _OURS.findall(str(error))
    for name, message in reversed(found):  # the last one in a traceback was raised
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, StrandlineError):
            ours = kind(message.strip())
            ours.__cause__ = error
            return ours
    return error
