"""Options of all commands: ``strandline`` itself shows them, and each command takes them, too."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import typer

_EVERY: Final = "Options of every command, before or after its name"
_NODES: Final = "The same, to connect to a node"


def _file(*names: str, text: str) -> Any:
    return typer.Option(*names, metavar="FILE", help=text, rich_help_panel=_NODES)


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """What was given for the running command, before or after its name."""

    json: Annotated[
        bool, typer.Option("--json", help="Print machine-readable output only.", rich_help_panel=_EVERY)
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole traceback of an error.", rich_help_panel=_EVERY)
    ] = False
    token: Annotated[str | None, _file("--token", text="The file with the token to authenticate with.")] = field(
        default=None, repr=False
    )
    ca: Annotated[str | None, _file("--ca", text="The authority that signs the nodes' certificates (PEM).")] = None
    cert: Annotated[str | None, _file("--cert", text="The certificate to show (PEM).")] = None
    cert_key: Annotated[str | None, _file("--cert-key", "--key", text="The key of that certificate (PEM).")] = field(
        default=None, repr=False
    )


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
    _GIVEN.set(replace(_GIVEN.get(), **{name: value for name, value in given.items() if value}))
