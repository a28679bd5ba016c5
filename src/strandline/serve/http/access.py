"""Who may do what with a stream: decided by the process around the application, asked once per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Access(StrEnum):
    """What a request needs to be allowed."""

    READ = "read"
    APPEND = "append"
    CONSUME = "consume"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Denied:
    """A request that is refused: 401 without known credentials, 403 with those of a caller who may not do it."""

    status: int
    reason: str
    """One sentence, without secrets."""


class Authoriser(Protocol):
    """Decides on requests. Called on the event loop: must not block."""

    def __call__(self, headers: Mapping[str, str], access: Access, stream: str) -> Denied | None:
        """None if the caller with these headers (names in lower case) may do this with the stream of this name."""


def allow_all(headers: Mapping[str, str], access: Access, stream: str) -> Denied | None:  # noqa: ARG001
    """Allow everything: for a server on loopback."""
    return None
