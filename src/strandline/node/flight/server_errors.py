"""Errors on their way to a node's callers, as a client of gRPC sees them, and as a client of Flight reads them."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.errors import Fenced, InvalidInput, NotReady, StorageError, StrandlineError
from strandline.formats.node.wire import cut, encode_error
from strandline.node.flight.client_errors import first_line

_LOGGER: Final = logging.getLogger(__name__)


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
