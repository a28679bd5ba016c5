"""Who may do what with a stream: decided by the process around the application, asked once per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TypeAlias

from strandline.serve.http.answers import HttpAnswer, problem


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

    def answer(self) -> HttpAnswer:
        """What the caller is told."""
        needs = {"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else {}
        return problem(self.status, self.reason, needs)


Authoriser: TypeAlias = Callable[[Mapping[str, str], Access, str], Denied | None]
"""None if the caller with these headers (names in lower case) may do this with the stream of this name.

Called on the event loop: must not block.
"""


def allow_all(headers: Mapping[str, str], access: Access, stream: str) -> Denied | None:  # noqa: ARG001
    """Allow everything: for a server on loopback."""
    return None
