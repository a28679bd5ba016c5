"""Errors over Flight: how a node's error leaves it, and how its callers raise it again as what the node raised."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.flight as fl

from strandline.errors import (
    CorruptData,
    Fenced,
    InvalidInput,
    NotReady,
    StorageError,
    StrandlineError,
    TransientStorageError,
)
from strandline.formats.node.wire import cut, decode_error, encode_error

_LOGGER: Final = logging.getLogger(__name__)

_TOO_LARGE: Final = "SERVER: Received message larger than max"
"""What gRPC says of a message that is longer than the other end takes."""

_UNREACHED: Final = (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightCancelledError, fl.FlightInternalError)


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
    if isinstance(error, (fl.FlightUnauthenticatedError, fl.FlightUnauthorizedError)) or _TOO_LARGE in why:
        kind = InvalidInput if _TOO_LARGE in why else Fenced
        return kind(f"{url} refused {what}: {why}.")
    if isinstance(error, _UNREACHED):
        return TransientStorageError(f"{url} did not answer {what}: {why}. Whether it was done is not known.")
    if isinstance(error, pa.ArrowNotImplementedError):
        return InvalidInput(f"{url} cannot do {what}: it is no node of this kind, or of another version.")
    if isinstance(error, fl.FlightError):
        return StorageError(f"{url} failed to do {what}: {why}.")
    return CorruptData(f"What {url} answered to {what} is damaged: {why}.")


def first_line(error: BaseException) -> str:
    """The gist of an error of Arrow, which may bring a whole trace."""
    lines = str(error).splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__


# --- on their way out ------------------------------------------------------------------------------------------


class Unauthenticated(Exception):
    """Who calls does not say who it is, in one sentence."""


class Code(StrEnum):
    """The status codes of gRPC that a call may end with, by their names."""

    UNKNOWN = "UNKNOWN"
    UNAVAILABLE = "UNAVAILABLE"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class Refusal(NamedTuple):
    """An error as a call ends with it: what any client of gRPC sees, and beside it what clients of Flight read."""

    code: Code
    sentence: str
    trailers: tuple[tuple[str, str | bytes], ...]


_DETAILS: Final = {
    Code.UNKNOWN: b"Failed",
    Code.PERMISSION_DENIED: b"Unauthorized",
    Code.UNAUTHENTICATED: b"Unauthenticated",
    Code.UNAVAILABLE: b"Unavailable",
}
"""What Flight's own errors are called where they travel."""

_IO_ERROR: Final = "5"
"""The kind of Arrow error that carries one of Flight's."""


def leaving(error: StrandlineError, code: Code | None = None) -> Refusal:
    """An error as a call ends with it: a status that tells any client whether to retry, and beside it what it is."""
    if code is None:
        code = Code.UNKNOWN
        if isinstance(error, Fenced):
            code = Code.PERMISSION_DENIED
        elif error.retryable:
            code = Code.UNAVAILABLE
    sentence = cut(str(error))
    return Refusal(
        code,
        sentence,
        (
            ("grpc-status-details-bin", encode_error(error)),
            ("x-arrow-status", _IO_ERROR),
            ("x-arrow-status-detail-bin", _DETAILS[code]),
            ("x-arrow-status-message-bin", sentence.encode(errors="replace")),
        ),
    )


def refusal_of(error: Exception, what: str) -> Refusal:
    """Whatever a node raised, as the caller is told it: without a trace of where."""
    if isinstance(error, Unauthenticated):
        return leaving(Fenced(str(error)), Code.UNAUTHENTICATED)
    if isinstance(error, StrandlineError):
        return leaving(error)
    if isinstance(error, (pa.ArrowException, MemoryError)):
        # What a caller sent and Arrow cannot read; what the node itself reads is checked before.
        return leaving(InvalidInput(f"{what} cannot be done with what was sent: {first_line(error)}."))
    _LOGGER.error("%s failed", what, exc_info=error)
    return leaving(StorageError(f"{what} failed on the node ({type(error).__name__}): its log says more."))


def stopping() -> NotReady:
    """Why a stream ends whose node is being closed."""
    return NotReady("The node is stopping: connect again, or ask another one.")
