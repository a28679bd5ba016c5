"""Options of all commands: ``strandline`` itself declares them, and each command takes them, too."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """What was given for the running command, before or after its name."""

    json: bool = False
    """Print one JSON value for programs."""
    debug: bool = False
    """An error keeps its traceback."""
    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    cert_key: str | None = field(default=None, repr=False)


OF_EVERY: Final = ("json", "debug")
OF_NODES: Final = ("token", "ca", "cert", "cert_key")
"""The options that connect to a node, of commands that may do so."""

_NONE: Final = SharedOptions()
_GIVEN: Final[ContextVar[SharedOptions]] = ContextVar("shared_options", default=_NONE)


def shared() -> SharedOptions:
    """The shared options of the running command."""
    return _GIVEN.get()


def begin(given: SharedOptions) -> None:
    """A run of the command line begins with these."""
    _GIVEN.set(given)


def add(given: dict[str, Any]) -> None:
    """The running command was given these itself: they win."""
    _GIVEN.set(replace(_GIVEN.get(), **given))
