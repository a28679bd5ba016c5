"""Groups of options: a dataclass whose fields are options is declared once, and serves every command that takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

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
        given = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [each]
        shown += [one.replace(kind=one.KEYWORD_ONLY) if name in groups else one for one in given]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return run
