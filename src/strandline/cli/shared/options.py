"""Options that are declared once: groups of options, which several commands take, and those of the program."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any, Final, ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")


def option(value: str, text: str, *names: str, **more: Any) -> Any:
    """An option with the name of its value and its help."""
    return typer.Option(*names, metavar=value, help=text, **more)


def flag(text: str, *names: str, **more: Any) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=text, **more)


def argument(name: str, text: str, **more: Any) -> Any:
    """An argument with its name and its help."""
    return typer.Argument(metavar=name, help=text, **more)


_EVERY: Final = "Options of every command, before or after its name"
_NODES: Final = "The same, to connect to a node"


_file: Final = partial(option, "FILE", rich_help_panel=_NODES)


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """The options of the program: what was given for the running command, before or after its name."""

    json: Annotated[bool, flag("Print machine-readable output only.", "--json", rich_help_panel=_EVERY)] = False
    debug: Annotated[bool, flag("Show the whole traceback of an error.", "--debug", rich_help_panel=_EVERY)] = False
    token: Annotated[str | None, _file("The file with the token to authenticate with.")] = field(
        default=None, repr=False
    )
    ca: Annotated[str | None, _file("The authority that signs the nodes' certificates (PEM).")] = None
    cert: Annotated[str | None, _file("The certificate to show (PEM).")] = None
    cert_key: Annotated[str | None, _file("The key of that certificate (PEM).", "--cert-key", "--key")] = field(
        default=None, repr=False
    )


OF_EVERY: Final = ("json", "debug")
OF_NODES: Final = ("token", "ca", "cert", "cert_key")
"""The options that connect to a node, of commands that may do so."""

_NONE: Final = SharedOptions()
_GIVEN: Final[ContextVar[SharedOptions]] = ContextVar("shared_options", default=_NONE)


def shared() -> SharedOptions:
    """The options of the program, as they are given for the running command."""
    return _GIVEN.get()


def begin(given: SharedOptions) -> None:
    """A run of the command line begins with these."""
    _GIVEN.set(given)


def add(given: dict[str, Any]) -> None:
    """The running command was given these itself: they win."""
    _GIVEN.set(replace(_GIVEN.get(), **{name: value for name, value in given.items() if value}))


def for_nodes() -> list[str]:
    """The options that connect to a node, of those that are given."""
    return [f"--{name.replace('_', '-')}" for name in OF_NODES if getattr(shared(), name) is not None]


def with_groups(command: Callable[P, R]) -> Callable[..., R]:
    """The command with the options of its groups: a parameter whose type is a dataclass is made of its fields.

    >>> @dataclass
    ... class Size:
    ...     width: int = 1
    >>> def draw(url: str, size: Size) -> tuple[str, Size]:
    ...     return url, size
    >>> with_groups(draw)(url="a", width=2)
    ('a', Size(width=2))
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    shown: list[inspect.Parameter] = []
    for name, each in parameters.items():
        found = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else ()
        shown += [option.replace(kind=option.KEYWORD_ONLY) for option in found] or [each]

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> R:
        for name, kind in groups.items():
            options[name] = kind(**{each.name: options.pop(each.name) for each in fields(kind) if each.name in options})
        return command(*arguments, **options)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return run
