"""Calls with arguments that a signature does not have: one sentence that says what to write.

Python's own error names positions and counts; the sentence names arguments, the nearest one for a wrong name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_SYNONYMS: Final[Mapping[str, tuple[str, ...]]] = {
    "end": ("upto",),
    "from_": ("since", "start"),
    "linger_ms": ("linger",),
    "name": ("slot",),
    "offset": ("position",),
    "since": ("start",),
    "start": ("since",),
    "to": ("upto",),
    "until": ("upto",),
}
"""Names that other systems have for an argument."""
_SHOWN: Final = 6


def misfit(
    call: Callable[..., Any],
    name: str,
    args: Sequence[object],
    options: Mapping[str, object],
    describe: Callable[[str], str | None],
) -> str | None:
    """What to write instead of these arguments; None if they fit.

    ``args`` are those without the object or class of a method. ``describe`` says what an argument is.

    >>> def wait(past: int, *, timeout: float = 1.0) -> None: ...
    >>> misfit(wait, "wait", (3, 2.0), {}, lambda _: None)
    'wait takes 1 argument by position (past), not 2: name the others (timeout=).'
    >>> misfit(wait, "wait", (3,), {"timout": 2.0}, lambda _: None)
    'wait has no argument timout=: did you mean timeout=?'
    >>> misfit(wait, "wait", (), {}, lambda _: "an offset")
    'wait needs past: an offset.'
    """
    shape = inspect.signature(call)
    try:
        shape.bind(*args, **options)
    except TypeError:
        parameters = [one for one in shape.parameters.values() if one.kind is not one.VAR_KEYWORD]
    else:
        return None
    names = [one.name for one in parameters]
    by_position = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if unknown := [option for option in options if option not in names]:
        return f"{name} has no argument {unknown[0]}=" + _instead(
            unknown[0], names, _needed(parameters, (), {}), describe
        )
    if len(args) > len(by_position):
        return _by_name(name, by_position, [one for one in names if one not in by_position], len(args))
    if twice := [one for one in by_position[: len(args)] if one in options]:
        return f"{name} got {twice[0]} by position and by name: write it once."
    needed = _needed(parameters, args, options)
    return f"{name} needs {_and(needed)}{_described(needed, describe)}."


def _instead(unknown: str, names: Sequence[str], needed: Sequence[str], describe: Callable[[str], str | None]) -> str:
    known = [other for other in _SYNONYMS.get(unknown, ()) if other in names]
    if near := known or difflib.get_close_matches(unknown, names, 1):
        return f": did you mean {near[0]}=?"
    if needed and (description := describe(needed[0])):
        return f": {needed[0]} is {description}."
    return f"; it has {_some(names)}." if names else "."


def _by_name(name: str, by_position: Sequence[str], by_name: Sequence[str], given: int) -> str:
    count = len(by_position)
    listed = f" ({', '.join(by_position)})" if by_position else ""
    taken = f"{count or 'no'} argument{'' if count == 1 else 's'}"
    advice = f": name the others ({_some(by_name)})" if by_name else ""
    return f"{name} takes {taken} by position{listed}, not {given}{advice}."


def _needed(
    parameters: Sequence[inspect.Parameter], args: Sequence[object], options: Mapping[str, object]
) -> list[str]:
    """Names of the arguments without a default that are missing; those that go by name only with a ``=``."""
    rest = [one for one in parameters[len(args) :] if one.name not in options and one.default is one.empty]
    return [
        f"{one.name}=" if one.kind is one.KEYWORD_ONLY else one.name
        for one in rest
        if one.kind is not one.VAR_POSITIONAL
    ]


def _described(needed: Sequence[str], describe: Callable[[str], str | None]) -> str:
    first = needed[0].removesuffix("=")
    if (description := describe(first)) is None:
        return ""
    return f": {description}" if len(needed) == 1 else f": {first} is {description}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"{one}=" for one in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _and(names: Sequence[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
