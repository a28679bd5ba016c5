"""Decoding of untrusted JSON: parsing within bounds, strict checks of values, and dataclasses by their type hints.

All functions raise ``ValueError``. The caller knows the file's name and turns it into an error of Strandline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints
from uuid import UUID

from strandline.errors import InvalidInput
from strandline.model.addresses import is_plain_name
from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.cursor import Cursor
from strandline.model.stamp import OpId, Stamped

T = TypeVar("T")

PlainName = Annotated[str, "a plain name"]
"""The type of a field that names a replica, a node or a snapshot."""

LARGEST: Final = 32 << 20
"""The largest document in bytes."""

MOST_VALUES: Final = 1 << 20
"""Limit on the values of a document: each takes up to a hundred bytes of memory, and as few as two as text."""


_FINGERPRINT: Final = re.compile(r"[0-9a-f]{16}")

_SEPARATORS: Final = (b",", b"[", b"{", b":")
"""Each value but the first follows one of these."""


def has_too_many_values(data: bytes | memoryview) -> bool:
    """Whether a document may hold more than ``MOST_VALUES`` values; separators within strings count too."""
    if len(data) <= MOST_VALUES:
        return False
    raw = bytes(data)
    return sum(map(raw.count, _SEPARATORS)) > MOST_VALUES


def parse_json(data: bytes | memoryview) -> Any:
    """The value in these bytes; ``ValueError`` if they are malformed or too large."""
    if len(data) > LARGEST or has_too_many_values(data):
        raise ValueError(f"{len(data):,} bytes are too large for a JSON document")
    try:
        return json.loads(bytes(data))
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def parse_object(data: bytes | memoryview) -> dict[str, Any]:
    """The object in these bytes; ``ValueError`` for any other value."""
    found = parse_json(data)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - the bytes are wrong, not the program
    return found


def whole(value: object) -> int:
    """A signed 64-bit integer."""
    if type(value) is not int or not -LARGEST_NUMBER - 1 <= value <= LARGEST_NUMBER:
        raise ValueError(f"{_shown(value)} is no whole number in range")
    return value


def natural(value: object, largest: int = LARGEST_NUMBER) -> int:
    """An integer from 0 to ``largest``."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{_shown(value)} is no whole number in range")
    return value


def text(value: object) -> str:
    """A string that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no text")  # noqa: TRY004 - the bytes are wrong, not the program
    value.encode()  # half a surrogate is a ValueError
    return value


def plain_name(value: object) -> str:
    """A plain name of a replica, a node or a snapshot; never a path."""
    if not is_plain_name(text(value)):
        raise ValueError(f"{str(value)[:200]!r} is no plain name")
    return str(value)


def flag(value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is neither true nor false")  # noqa: TRY004 - the bytes are wrong, not the program
    return value


def _shown(value: object) -> str:
    """The beginning of a value, for an error: it may be large."""
    return type(value).__name__ if isinstance(value, dict | list) else str(value)[:80]


def uuid(value: object) -> UUID:
    """A UUID as text."""
    try:
        return UUID(text(value))
    except ValueError as error:
        raise ValueError(f"{_shown(value)!r} is no UUID") from error


def cursor(value: object) -> Cursor:
    """A cursor as text."""
    try:
        found = Cursor.parse(text(value))
    except InvalidInput as error:
        raise ValueError(str(error).rstrip(".")) from error
    natural(max(found.next, found.term))
    return found


def items(value: object, count: int | None = None) -> list[Any]:
    """A list, of ``count`` values if that is given."""
    if not isinstance(value, list) or count not in (None, len(value)):
        raise ValueError(f"{_shown(value)} is no list" + (f" of {count}" if count else ""))
    return value


def fingerprint_text(fingerprint: int) -> str:
    """The fingerprint of a batch as text."""
    return f"{fingerprint:016x}"


def fingerprint_of(value: object) -> int | None:
    """The fingerprint in a text of :func:`fingerprint_text`; None if it is unknown."""
    if value is None:
        return None
    if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no fingerprint")
    return int(value, 16)


def read_record(kind: type[T], found: object, *, optional: Collection[str] = (), **given: Any) -> T:
    """A dataclass from an object with a field of the same name for each of its own; further fields are ignored.

    The type hints decide: ``int`` (from 0 on), ``str``, ``PlainName``, ``bool``, ``UUID``, ``Cursor``, a dataclass,
    ``X | None``, ``tuple[X, ...]`` and ``tuple[X, X]``. Fields in ``given`` are not read; those in ``optional`` keep
    their default if they are missing. ``ValueError`` names the field that is wrong or missing.

    >>> read_record(Stamped, {"revision": 7, "recent": []}, value="x")
    Stamped(value='x', revision=7, recent=())
    >>> read_record(Stamped, {"revision": True}, value="x")
    Traceback (most recent call last):
    ValueError: 'revision': True is no whole number in range
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{_shown(found)} is no JSON object")  # noqa: TRY004 - the bytes are wrong, not the program
    for name, read in _readers(kind).items():  # type: ignore[arg-type]
        if name in given or (name in optional and name not in found):
            continue
        if name not in found:
            raise ValueError(f"{name!r} is missing")
        try:
            given[name] = read(found[name])
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
    return kind(**given)


@cache
def _readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _reader(hints[field.name]) for field in fields_of(kind)}


_SCALARS: Final[dict[Any, Callable[[Any], Any]]] = {
    int: natural, str: text, PlainName: plain_name, bool: flag, UUID: uuid, OpId: uuid, Cursor: cursor,
}  # fmt: skip


def _reader(hint: Any) -> Callable[[Any], Any]:
    arguments = get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if get_origin(hint) is tuple:
        item, count = _reader(arguments[0]), None if ... in arguments else len(arguments)
        return lambda value: tuple(map(item, items(value, count)))
    if type(None) in arguments:
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    return partial(read_record, hint) if is_dataclass(hint) and isinstance(hint, type) else _unreadable


def _unreadable(value: object) -> Any:
    raise TypeError(f"No reader for {_shown(value)}: give it to read_record.")


def stamp_fields(state: Stamped[Any]) -> dict[str, Any]:
    """The fields of a cell's revision and latest operations."""
    return {"revision": state.revision, "recent": [op.hex for op in state.recent]}
