"""Public names that are imported on first use, so that importing a package stays cheap and extras stay optional.

The package itself is above all rooms. Before any room is imported it hands down what opens an address, so that calls
of lower rooms take addresses, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any, Final

_LISTED: Final = re.compile(r"^    (?:from (\S+) import (\w+) as (\w+)|(\w+) = (\w+)\b.*)$", re.MULTILINE)
_ENDS: Final = re.compile(r"^\S", re.MULTILINE)
_OPENERS: Final[list[Callable[..., Any]]] = []


def opens_addresses(opener: Callable[..., Any]) -> None:
    """Make this the call by which lower rooms open an address."""
    _OPENERS[:] = [opener]


def open_address(address: object, **options: Any) -> Any:
    """The log at an address, of any kind, as ``strandline.open`` opens it."""
    [opener] = _OPENERS
    return opener(address, **options)


def lazy(spec: ModuleSpec) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose public names are in other modules.

    The names are those that the package imports for type checkers, below ``if TYPE_CHECKING:``: each is listed once. A
    name can be another one there: ``from shop.till import open_till as open_till``, then ``open = open_till``.

    >>> import strandline as sl
    >>> sl.values.Json.__module__, "Json" in dir(sl.values)
    ('strandline.values.codecs.structs', True)
    >>> sl.values.Cart
    Traceback (most recent call last):
    AttributeError: module 'strandline.values' has no attribute 'Cart'
    """
    places = _places(spec)
    names = sorted(places)

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {spec.name!r} has no attribute {name!r}")
        module, attribute = places[name]
        if module == spec.name:
            return import_module(f"{module}.{attribute}")
        return getattr(import_module(module), attribute)

    return get, lambda: names, names


def _places(spec: ModuleSpec) -> dict[str, tuple[str, str]]:
    """The module of each public name, and what it is called there."""
    read = getattr(spec.loader, "get_data", None)  # of a folder or of an archive
    if read is None or not (spec.origin or "").endswith(".py"):
        raise ImportError(f"{spec.name} was installed without its source files, which list its names: install those.")
    source = read(spec.origin).decode()  # get_source() would import a tokenizer, which takes longer than all of this
    listed = _ENDS.split(source.partition("\nif TYPE_CHECKING:\n")[2], maxsplit=1)[0]
    places = {}
    for module, attribute, name, other, of in _LISTED.findall(listed):
        if name:
            places[name] = (module, attribute)
        else:
            places[other] = places.pop(of)
    return places
