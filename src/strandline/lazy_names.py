"""Public names that are imported on first use, so that importing a package stays cheap and extras stay optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose public names are in other modules.

    ``modules`` has the module of each public name: ``"module"``, or ``"module:other"`` if it has another name
    there, or ``"module:"`` for the module itself.

    >>> get, _, names = lazy("shop", {"Path": "pathlib", "time": "time:"})
    >>> get("Path").__module__.partition(".")[0], get("time").__name__, names
    ('pathlib', 'time', ['Path', 'time'])
    >>> get("Cart")
    Traceback (most recent call last):
    AttributeError: module 'shop' has no attribute 'Cart'
    """
    names = sorted(modules)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name, as_is, real = modules[name].partition(":")
        module = import_module(module_name)
        return module if as_is and not real else getattr(module, real or name)

    return get, lambda: names, names
