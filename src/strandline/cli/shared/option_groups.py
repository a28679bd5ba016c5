"""Groups of options: a dataclass whose fields are options is declared once, and serves every command that takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from strandline.cli.shared.shared_options import SharedOptions

P = ParamSpec("P")
R = TypeVar("R")


def with_groups(command: Callable[P, R]) -> Callable[..., R]:
    """The command with the options of its groups: a parameter whose type is a dataclass is made of its fields.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     width: int = 1
    >>> list(inspect.signature(with_groups(lambda url, size: None)).parameters)
    ['url', 'size']
    >>> def draw(url: str, size: Size) -> tuple[str, Size]:
    ...     return url, size
    >>> with_groups(draw)(url="a", width=2)
    ('a', Size(width=2))
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    if not groups:
        return command

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> R:
        for name, kind in groups.items():
            options[name] = kind(**{each.name: options.pop(each.name) for each in fields(kind) if each.name in options})
        return command(*arguments, **options)

    shown: list[inspect.Parameter] = []
    for name, each in parameters.items():
        shown += options_of(groups[name]) if name in groups else [each]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return run


def options_of(group: Any) -> list[inspect.Parameter]:
    """The options of a group."""
    found = inspect.signature(group, eval_str=True).parameters.values()
    return [each.replace(kind=each.KEYWORD_ONLY) for each in found]


def hidden_options(names: Sequence[str], taken: Container[str]) -> list[inspect.Parameter]:
    """The shared options of these names, which help does not show, without flags that the command has itself."""
    options = []
    for each in options_of(SharedOptions):
        if each.name in names:
            kind, shown = get_args(each.annotation)
            option = copy(shown)
            option.hidden = True
            option.param_decls = [flag for flag in shown.param_decls or () if flag.lstrip("-") not in taken]
            options.append(each.replace(annotation=Annotated[kind, option]))
    return options
