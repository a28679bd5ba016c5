"""Errors over Flight: how a node sends an error, and how its callers raise it again as the same class."""

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
    StorageError,
    StrandlineError,
    TransientStorageError,
)
from strandline.formats.node.wire import cut, decode_error, encode_error

_LOGGER: Final = logging.getLogger(__name__)

_TOO_LARGE: Final = "SERVER: Received message larger than max"
"""gRPC's text for a message that is longer than the receiver accepts."""

_UNREACHED: Final = (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightCancelledError, fl.FlightInternalError)


@contextlib.contextmanager
def node_errors(url: str, what: str) -> Iterator[None]:
    """Raise errors of Flight as the node's own errors.

    ``TransientStorageError`` if no answer came: the call may have been executed. ``CorruptData`` for an answer that
    cannot be read.
    """
    try:
        yield
    except pa.ArrowException as error:
        raise node_error(error, url, what) from error


def node_error(error: Exception, url: str, what: str) -> StrandlineError:
    """The error of this package for an error of Flight."""
    known = decode_error(getattr(error, "extra_info", None))
    if known is not None:
        return known
    why = first_line(error)
    if isinstance(error, (fl.FlightUnauthenticatedError, fl.FlightUnauthorizedError)) or _TOO_LARGE in why:
        kind = InvalidInput if _TOO_LARGE in why else Fenced
        return kind(f"{url} refused {what}: {why}.")
    if isinstance(error, _UNREACHED):
        return TransientStorageError(f"{url} did not answer {what}: {why}. The call may have been executed.")
    if isinstance(error, pa.ArrowNotImplementedError):
        return InvalidInput(f"{url} cannot do {what}: it is not a Strandline node, or one of another version.")
    if isinstance(error, fl.FlightError):
        return StorageError(f"{url} failed to do {what}: {why}.")
    return CorruptData(f"The answer of {url} to {what} is damaged: {why}.")


def first_line(error: BaseException) -> str:
    """The first line of an error of Arrow, which may hold a whole trace."""
    lines = str(error).splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__


# --- sending errors --------------------------------------------------------------------------------------------


class Unauthenticated(Exception):
    """The caller has sent no valid credentials."""


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


def refusal_of(error: Exception, what: str) -> Refusal:
    """The refusal for any exception, without a stack trace.

    Any client sees by the status whether to retry; the trailers hold the error.
    """
    code = None
    if isinstance(error, Unauthenticated):
        error, code = Fenced(str(error)), Code.UNAUTHENTICATED
    elif isinstance(error, (pa.ArrowException, MemoryError)):
        # Arrow cannot read the caller's data; the node's own data is checked before.
        error = InvalidInput(f"{what} failed, because Arrow cannot read the request: {first_line(error)}.")
    elif not isinstance(error, StrandlineError):
        _LOGGER.error("%s failed", what, exc_info=error)
        error = StorageError(f"{what} failed on the node ({type(error).__name__}): its log says more.")
    if code is None:
        may_retry = Code.UNAVAILABLE if error.retryable else Code.UNKNOWN
        code = Code.PERMISSION_DENIED if isinstance(error, Fenced) else may_retry
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
