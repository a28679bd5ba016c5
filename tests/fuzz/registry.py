"""All targets, by name and by group; what a target needs is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from tests.fuzz.targets import Target

GROUPS = ("formats", "values", "bodies", "extremes", "places", "flight", "commands")
_BROKEN = "broken"


def group(name: str) -> tuple[Target, ...]:
    """The targets of a group."""
    targets: tuple[Target, ...] = import_module(f"tests.fuzz.{name}").TARGETS
    return targets


def find(name: str) -> Target:
    """The target of this name; ``LookupError`` if there is none."""
    for where in (_BROKEN,) if name.startswith(f"{_BROKEN}-") else GROUPS:
        for target in group(where):
            if target.name == name:
                return target
    raise LookupError(f"There is no target {name!r}: see --list.")


def named(names: Iterable[str]) -> list[str]:
    """The targets of these names, which may be of groups too; all of them for none."""
    found: list[str] = []
    for name in list(names) or GROUPS:
        found += [target.name for target in group(name)] if name in GROUPS else [find(name).name]
    return list(dict.fromkeys(found))
