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
"""gRPC's words for a message that is longer than the other end accepts."""

_UNREACHED: Final = (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightCancelledError, fl.FlightInternalError)


@contextlib.contextmanager
def asking(url: str, what: str) -> Iterator[None]:
    """Raise errors of Flight as what the node raised.

    ``TransientStorageError`` if no answer came: the call may have been executed. ``CorruptData`` for an answer that
    cannot be read.
    """
    try:
        yield
    except pa.ArrowException as error:
        raise arrived(error, url, what) from error


def arrived(error: Exception, url: str, what: str) -> StrandlineError:
    """The error of ours that an error of Flight stands for."""
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
    """The first line of an error of Arrow, which may hold a whole trace."""
    lines = str(error).splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__


# --- on their way out ------------------------------------------------------------------------------------------


class Unauthenticated(Exception):
    """The caller has shown no known credentials."""


class Code(StrEnum):
    """Status codes of gRPC that a call may end with."""

    UNKNOWN = "UNKNOWN"
    UNAVAILABLE = "UNAVAILABLE"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class Refusal(NamedTuple):
    """An error that ends a call: the status for any gRPC client, and trailers for Flight clients."""

    code: Code
    sentence: str
    trailers: tuple[tuple[str, str | bytes], ...]


_DETAILS: Final = {
    Code.UNKNOWN: b"Failed",
    Code.PERMISSION_DENIED: b"Unauthorized",
    Code.UNAUTHENTICATED: b"Unauthenticated",
    Code.UNAVAILABLE: b"Unavailable",
}
"""Flight's own errors, by their names on the wire."""

_IO_ERROR: Final = "5"
"""The kind of Arrow error that carries one of Flight's."""


def leaving(error: StrandlineError, code: Code | None = None) -> Refusal:
    """The refusal for an error: its status tells any client whether to retry, its trailers hold the error."""
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
    """The refusal for any exception, without a stack trace."""
    if isinstance(error, Unauthenticated):
        return leaving(Fenced(str(error)), Code.UNAUTHENTICATED)
    if isinstance(error, StrandlineError):
        return leaving(error)
    if isinstance(error, (pa.ArrowException, MemoryError)):
        # Arrow cannot read what the caller sent; data of the node's own is checked before.
        return leaving(InvalidInput(f"{what} cannot be done with what was sent: {first_line(error)}."))
    _LOGGER.error("%s failed", what, exc_info=error)
    return leaving(StorageError(f"{what} failed on the node ({type(error).__name__}): its log says more."))


def stopping() -> NotReady:
    """The error that ends streams while the node is being closed."""
    return NotReady("The node is stopping: connect again, or ask another one.")
