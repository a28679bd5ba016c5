"""Decoding of untrusted JSON: parsing within bounds, types of values with their ranges, and dataclasses of such types.

All functions raise ``ValueError``. The caller knows the file's name and turns it into an error of Strandline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec

from strandline.errors import InvalidInput
from strandline.model.addresses import PLAIN_NAME
from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.cursor import Cursor
from strandline.model.stamp import Stamped

T = TypeVar("T")

PlainName = Annotated[str, msgspec.Meta(pattern=PLAIN_NAME)]
"""A plain name of a replica, a node or a snapshot; never a path."""

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


def parse_json(data: bytes | memoryview, largest: int = LARGEST) -> Any:
    """The value in these bytes of UTF-8; ``ValueError`` if they are malformed, too large, or hold half a surrogate."""
    if len(data) > largest or has_too_many_values(data):
        most = f"{largest:,}, and {MOST_VALUES:,} values"
        raise ValueError(f"{len(data):,} bytes are too large for a JSON document, which has no more than {most}")
    raw = str(data, "utf-8")  # json would take other encodings of bytes, too, and half a surrogate
    try:
        found = json.loads(raw)
        if r"\u" in raw:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds broken text") from error
    return found


def parse_object(data: bytes | memoryview, largest: int = LARGEST) -> dict[str, Any]:
    """The object in these bytes; ``ValueError`` for any other value."""
    found = parse_json(data, largest)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - the bytes are wrong, not the program
    return found


def natural(value: object) -> int:
    """An integer from 0 on that fits 63 bits."""
    if type(value) is not int or not 0 <= value <= LARGEST_NUMBER:
        raise ValueError(f"{str(value)[:80]} is no whole number in range")
    return value


def cursor(value: object) -> Cursor:
    """A cursor as text."""
    try:
        found = Cursor.parse(msgspec.convert(value, str))
    except InvalidInput as error:
        raise ValueError(str(error).rstrip(".")) from error
    natural(max(found.next, found.term))
    return found


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

    Its type hints decide. Fields in ``given`` are as they are there; those in ``optional`` keep their default if they
    are missing. ``ValueError`` names the field that is wrong or missing.

    >>> read_record(Stamped, {"revision": 7, "recent": []}, value="x")
    Stamped(value='x', revision=7, recent=())
    >>> read_record(Stamped, {"revision": True}, value="x", recent=())
    Traceback (most recent call last):
    msgspec.ValidationError: Expected `int`, got `bool` - at `$.revision`
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"a {type(found).__name__} is no JSON object")  # noqa: TRY004 - the bytes are wrong
    fields = {**found, **given}
    for name in _names(kind) - fields.keys():  # type: ignore[arg-type]
        if name not in optional:
            raise ValueError(f"{name!r} is missing")
    return msgspec.convert(fields, kind)


@cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields_of(kind))


def stamp_fields(state: Stamped[Any]) -> dict[str, Any]:
    """The fields of a cell's revision and latest operations."""
    return {"revision": state.revision, "recent": [op.hex for op in state.recent]}
