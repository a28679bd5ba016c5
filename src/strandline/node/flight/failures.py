"""Errors on their way over Flight: they leave a node as Flight's, and are raised by its callers as what they were."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl

from strandline.formats.wire import cut, decode_error, encode_error
from strandline.model.errors import (
    CorruptData,
    Fenced,
    InvalidInput,
    NotReady,
    StorageError,
    StrandlineError,
    TransientStorageError,
)

_LOGGER: Final = logging.getLogger(__name__)

_UNREACHED: Final = (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightCancelledError, fl.FlightInternalError)


def leaving(error: StrandlineError) -> Any:
    """An error as Flight carries it: a status that tells any client whether to retry, and beside it what it is."""
    kind = fl.FlightServerError
    if isinstance(error, Fenced):
        kind = fl.FlightUnauthorizedError
    elif error.retryable:
        kind = fl.FlightUnavailableError
    return kind(cut(str(error)), encode_error(error))


def unknown_caller(sentence: str) -> Any:
    """The error for who does not say who it is."""
    return fl.FlightUnauthenticatedError(sentence, encode_error(Fenced(sentence)))


@contextlib.contextmanager
def answering(what: str) -> Iterator[None]:
    """Whatever a node raises within goes over the wire as what it is, without a trace of where."""
    try:
        yield
    except StrandlineError as error:
        raise leaving(error) from error
    except fl.FlightError:
        raise
    except (pa.ArrowException, MemoryError) as error:
        # What a caller sent and Arrow cannot read; what the node itself reads is checked before.
        raise leaving(InvalidInput(f"{what} cannot be done with what was sent: {first_line(error)}.")) from error
    except OSError as error:
        # Flight's own: the caller has gone, and nobody hears the answer. Those of the disk are ours by now.
        _LOGGER.info("%s: the caller has gone (%s).", what, first_line(error))
        raise leaving(TransientStorageError(f"{what} was not heard of by its caller: connect again.")) from error
    except Exception as error:
        _LOGGER.exception("%s failed", what)
        failure = StorageError(f"{what} failed on the node ({type(error).__name__}): its log says more.")
        raise leaving(failure) from error


@contextlib.contextmanager
def asking(url: str, what: str) -> Iterator[None]:
    """Whatever comes back from a node is raised as what the node raised.

    ``TransientStorageError`` if no answer came: whether it was done is not known then. ``CorruptData`` for what is no
    answer.
    """
    try:
        yield
    except pa.ArrowException as error:
        raise arrived(error, url, what) from error


def arrived(error: Exception, url: str, what: str) -> StrandlineError:
    """What an error of Flight stands for."""
    known = decode_error(getattr(error, "extra_info", None))
    if known is not None:
        return known
    why = first_line(error)
    if isinstance(error, (fl.FlightUnauthenticatedError, fl.FlightUnauthorizedError)):
        return Fenced(f"{url} refused {what}: {why}.")
    if isinstance(error, _UNREACHED):
        return TransientStorageError(f"{url} did not answer {what}: {why}. Whether it was done is not known.")
    if isinstance(error, pa.ArrowNotImplementedError):
        return InvalidInput(f"{url} cannot do {what}: it is no node of this kind, or of another version.")
    if isinstance(error, fl.FlightError):
        return StorageError(f"{url} failed to do {what}: {why}.")
    return CorruptData(f"What {url} answered to {what} is damaged: {why}.")


def stopping() -> NotReady:
    """Why a stream ends whose node is being closed."""
    return NotReady("The node is stopping: connect again, or ask another one.")


def first_line(error: BaseException) -> str:
    """The gist of an error of Arrow, which may bring a whole trace."""
    lines = str(error).splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
