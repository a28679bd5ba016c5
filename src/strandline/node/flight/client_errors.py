"""Errors that come back over Flight: raised by a node's callers as what the node raised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

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
from strandline.formats.node.wire import decode_error

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
