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
"""On top of what the store does itself: a query that ends has to be started again by somebody."""

_OURS = re.compile(r"strandline\.errors\.(\w+): ([^\n]*)")


def patiently(
    action: Callable[[], R], *, backoff: Backoff | None = None, clock: Clock = CLOCK, chance: Chance = CHANCE
) -> R:
    """What the action returns; failures that may pass are tried again a bounded number of times."""
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
    r"""The error of ours that ended a Spark job or query, if there is one in its text; else the error itself.

    Spark hands an error of a Python worker on as the text of its traceback.

    >>> unwrapped(RuntimeError("... strandline.errors.Fenced: Slot 'a' is held by 'b'.\n at org.apache..."))
    Fenced("Slot 'a' is held by 'b'.")
    """
    if isinstance(error, StrandlineError):
        return error
    found = _OURS.findall(str(error))
    for name, message in reversed(found):  # the last one in a traceback is the one that was raised
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, StrandlineError):
            ours = kind(message.strip())
            ours.__cause__ = error
            return ours
    return error
