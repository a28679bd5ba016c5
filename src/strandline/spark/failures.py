"""Failure classification: which are retryable, and which Strandline error caused a Spark error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.errors import AnalysisException

from strandline import errors
from strandline.errors import InvalidInput, JobFailed, StrandlineError, TransformFailed, printable
from strandline.storage.env import SYSTEM, Env
from strandline.storage.retry import Backoff

if TYPE_CHECKING:
    GatewayError = OSError
else:
    try:
        from py4j.protocol import Py4JError as GatewayError
    except ModuleNotFoundError:  # pyspark-client, which talks to Spark Connect alone
        GatewayError = ConnectionError

R = TypeVar("R")

_OWN_FRAME: Final = re.compile(r'File "[^"\n]*[/\\]strandline[/\\](?:spark|tables|values|log|storage|tier|node)[/\\]')
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+\S.*", re.MULTILINE)
_OUT_OF_MEMORY: Final = re.compile(
    r"^(?:\S*\.)?(?:MemoryError|ArrowMemoryError|RangeTooLarge)\b|java\.lang\.OutOfMemoryError", re.MULTILINE
)
_SAME_FAILURES: Final = 3
"""Attempts at the same failure of the user's functions: a service that they call may be down."""

PATIENCE: Final = Backoff(attempts=6, base=0.5, ceiling=8.0)
"""On top of the store's own retries: a query that ends has to be restarted by its user."""

_LOST: Final = Backoff(attempts=4, base=0.5, ceiling=8.0)

_OURS = re.compile(r"strandline\.errors\.(\w+): ([^\n]*)")


def retried(action: Callable[[], R], *, backoff: Backoff | None = None, env: Env = SYSTEM) -> R:
    """Run the action; retryable failures are retried a bounded number of times."""
    return (backoff or PATIENCE).repeat(action, lambda error: error.retryable, env)


class UserFailures:
    """Distinguishes failures of the user's own functions in Spark jobs, which repeat, from those of the cluster."""

    def __init__(self) -> None:
        self._last = ""
        self._count = 0

    def succeeded(self) -> None:
        """A job ended well."""
        self._last, self._count = "", 0

    def judged(self, failed: StrandlineError, cause: BaseException | None) -> StrandlineError:
        """The failure; ``TransformFailed`` if the user's functions have raised the same several times in a row."""
        raised = user_traceback(cause)
        if raised is None:
            self.succeeded()
            return failed
        reason = raised.strip().splitlines()[-1]
        self._count = self._count + 1 if reason == self._last else 1
        self._last = reason
        if self._count < _SAME_FAILURES:
            return failed
        found = TransformFailed(
            f"The transform failed {self._count} times in a row, and nothing of the range was applied: "
            f"{printable(reason[:300])}. Correct it, and start the pipeline again."
        )
        found.add_note(raised)
        return found


def user_traceback(error: BaseException | None) -> str | None:
    """The Python traceback of the user's own code in an error of Spark; None if something else failed.

    A worker that was killed leaves no traceback, and our own tasks have frames of this package in theirs.
    """
    if isinstance(error, AnalysisException):  # of a query that the user's function built
        return str(error)
    found = tracebacks(error)
    return None if not found or any(_OWN_FRAME.search(one) for one in found) else str(found[-1])


def tracebacks(error: BaseException | None) -> list[str]:
    """The Python tracebacks in the text of an error of Spark."""
    return [] if error is None else _TRACEBACK.findall(str(error))


def is_out_of_memory(error: BaseException) -> bool:
    r"""Whether a task had too little memory, in Python, Arrow or Java.

    >>> is_out_of_memory(
    ...     RuntimeError("Traceback (most recent call last):\n  File ...\npyarrow.lib.ArrowMemoryError: malloc")
    ... )
    True
    """
    return _OUT_OF_MEMORY.search(str(error)) is not None


def rerun_if_lost(job: Callable[[], R]) -> R:
    """Run a Spark job; again, a bounded number of times, if it failed without an error of Python.

    An executor was lost then, or a worker was killed or did not start. ``local[N]`` repeats no task by itself.
    """
    return _LOST.repeat(job, _is_lost, SYSTEM)


def _is_lost(error: StrandlineError) -> bool:
    cause = error.__cause__ if isinstance(error, JobFailed) else None
    return cause is not None and not tracebacks(cause)


def unpicklable(what: str, error: BaseException) -> InvalidInput:
    """The error for a function that cannot be sent to executors."""
    reason = printable(str(error).strip().partition("\n")[0][:200])
    return InvalidInput(
        f"{what} cannot be sent to Spark's executors ({reason}): make what cannot be pickled, such as connections, "
        "locks and files, inside of the function."
    )


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
            if isinstance(ours, TransformFailed):
                ours.add_note("\n".join(tracebacks(error)))
            return ours
    return error
