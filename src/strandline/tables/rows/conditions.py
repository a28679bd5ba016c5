"""Conditions: which records of a log a table takes. Pure; picklable for workers; recorded by the table.

A record has a *label* by each source of labels: a header, a field of its value, or the first part of its key. A
condition compares a label, or the beginning of the key. One log is routed into many tables by one label
(:mod:`strandline.tables.route`), which is computed once for all of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput, Unsupported
from strandline.model.arguments import checked, shown

_MOST_LABELS: Final = 8
_MOST_DEPTH: Final = 16


class Label(Protocol):
    """A source of labels."""

    def of(self, records: pa.Table) -> pa.ChunkedArray:
        """The label of each record, as text; null for a record that has none."""

    @property
    def name(self) -> str:
        """The source in messages, and as a table records it."""


@dataclass(frozen=True, slots=True)
class HeaderLabel:
    """The value of a header; the first one if there are several of that name."""

    header: str

    @property
    def name(self) -> str:
        """The source in messages."""
        return f"header {self.header}"

    def of(self, records: pa.Table) -> pa.ChunkedArray:
        """The header's value, if it is UTF-8."""
        return _texts(pc.map_lookup(records.column("headers"), self.header, "first"))


@dataclass(frozen=True, slots=True)
class KeyLabel:
    """The key up to a separator; a key without the separator has no label."""

    until: bytes

    @property
    def name(self) -> str:
        """The source in messages."""
        return f"key until {self.until.decode(errors='backslashreplace')}"

    def of(self, records: pa.Table) -> pa.ChunkedArray:
        """The first part of each key, if it is UTF-8."""
        keys = records.column("key")
        has = pc.fill_null(pc.greater_equal(pc.find_substring(keys, self.until), 0), False)
        parts = pc.split_pattern(keys, self.until, max_splits=1)
        return _texts(pc.if_else(has, pc.list_element(_never_empty(parts), 0), pa.scalar(None, pa.binary())))


@dataclass(frozen=True, slots=True)
class FieldLabel:
    """Fields of JSON values, as paths with dots; the labels of several fields are joined by dots.

    Also of a Debezium event within a ``payload``. A field is text or a whole number; anything else is no label.
    """

    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """The source in messages."""
        return f"field {' and '.join(self.paths)}"

    def of(self, records: pa.Table) -> pa.ChunkedArray:
        """The field of each value; null where the value is none, no JSON, or lacks it."""
        read = _field_reader(self.paths)
        chunks = [pa.array([read(one) for one in chunk.to_pylist()], pa.string()) for chunk in _values(records)]
        return pa.chunked_array(chunks, pa.string())


@dataclass(frozen=True, slots=True)
class RowCondition:
    """Which records a table takes: those whose key begins with ``prefix``, or whose ``label`` is ``equals``."""

    label: Label | None = None
    equals: str = ""
    prefix: bytes = b""

    def __str__(self) -> str:
        return f"{self.label.name} is {self.equals!r}" if self.label is not None else f"key begins with {self.prefix!r}"

    def mask(self, records: pa.Table) -> pa.ChunkedArray:
        """Which of the records it takes; never null."""
        if self.label is None:
            return pc.fill_null(pc.starts_with(records.column("key"), self.prefix), False)
        return pc.fill_null(pc.equal(self.label.of(records), self.equals), False)

    def recorded(self) -> dict[str, Any]:
        """The condition as a table records it."""
        match self.label:
            case None:
                return {"key_prefix": self.prefix.hex()}
            case HeaderLabel(header):
                return {"header": header, "equals": self.equals}
            case FieldLabel(paths):
                return {"field": list(paths), "equals": self.equals}
            case KeyLabel(until):
                return {"key_until": until.hex(), "equals": self.equals}
        raise AssertionError(self.label)


@dataclass(frozen=True, slots=True)
class RestOf:
    """Takes the records that a route gives to no other table."""

    is_taken: Callable[[pa.Table], pa.ChunkedArray]
    """Which records the others take."""

    def __str__(self) -> str:
        return "no other table of the route takes it"

    def mask(self, records: pa.Table) -> pa.ChunkedArray:
        """Which of the records it takes; never null."""
        return pc.invert(self.is_taken(records))

    def recorded(self) -> dict[str, Any]:
        """The condition as a table records it: what the others take may change with the route."""
        return {"rest": True}


Taken = RowCondition | RestOf


@checked
def where(
    *,
    key_prefix: bytes | None = None,
    field: str | Sequence[str] | None = None,
    header: str | None = None,
    key_until: bytes | None = None,
    equals: str | None = None,
) -> RowCondition:
    """The condition of a table, for its sink's ``taking``: which records of a log the table takes.

    Either those whose key begins with ``key_prefix``; or those whose ``field``, ``header`` or ``key_until`` ``equals``
    a text. ``field`` is a path in JSON values, such as ``"source.table"``, also within Debezium's ``payload``; several
    paths are joined by dots. ``key_until`` is the key up to a separator.

    >>> print(where(field="source.table", equals="orders"), "-", where(key_prefix=b"orders/"))
    field source.table is 'orders' - key begins with b'orders/'
    """
    if key_prefix is not None:
        if (field, header, key_until, equals) != (None,) * 4:
            raise InvalidInput("key_prefix stands alone: give it without field, header, key_until and equals.")
        return RowCondition(prefix=key_prefix)
    label = label_of(field=field, header=header, key_until=key_until)
    if equals is None:
        raise InvalidInput(f"equals is missing: the text that the {label.name} has in the table's records.")
    return RowCondition(label, equals)


def label_of(*, field: str | Sequence[str] | None, header: str | None, key_until: bytes | None) -> Label:
    """The one source of labels that is given; ``InvalidInput`` for none or several."""
    if sum(one is not None for one in (field, header, key_until)) != 1:
        raise InvalidInput("Records are routed by one thing: give either field, header or key_until.")
    if header is not None:
        return HeaderLabel(header)
    if key_until is not None:
        if not key_until:
            raise InvalidInput(
                "key_until is empty: name the separator behind the first part of each key, such as b'/'."
            )
        return KeyLabel(key_until)
    paths = (field,) if isinstance(field, str) else tuple(field or ())
    for path in paths:
        if not all(path.split(".")) or path.count(".") >= _MOST_DEPTH:
            raise InvalidInput(f"field is a path such as 'source.table', or several, not {shown(path)}.")
    if not 1 <= len(paths) <= _MOST_LABELS or len(set(paths)) < len(paths):
        raise InvalidInput(f"field names between 1 and {_MOST_LABELS} different paths, not {len(paths)}.")
    try:
        _field_reader(paths)
    except ValueError as error:  # of the library for JSON
        raise InvalidInput(f"The fields {shown(paths)} cannot be read from JSON: {error}") from error
    return FieldLabel(paths)


def recorded_condition(recorded: str, where_: str) -> RowCondition | None:
    """The condition in what a table records of its shape; None if it takes all records.

    ``Unsupported`` for the rest of a route: which records that are is known to the route alone.
    """
    found = json.loads(recorded)
    only = found.get("only") if isinstance(found, dict) else None
    if only is None:
        return None
    if "rest" in only:
        raise Unsupported(
            f"The table {where_} takes what a route gives to no other table, which only that route can tell: use its "
            "sink in the program that follows the route."
        )
    given = {name: bytes.fromhex(only[name]) for name in ("key_prefix", "key_until") if name in only}
    return where(**{**only, **given})


def _values(records: pa.Table) -> list[pa.Array]:
    return list(records.column("value").chunks)


def _never_empty(parts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Lists without a null among them: ``list_element`` needs an element in each."""
    return pc.fill_null(parts, pa.scalar([b""], parts.type))


def _texts(found: pa.ChunkedArray) -> pa.ChunkedArray:
    """Bytes as text; null where they are not UTF-8."""
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.chunked_array([_each_text(chunk) for chunk in found.chunks], pa.string())


def _each_text(found: pa.Array) -> pa.Array:
    def text(one: bytes | None) -> str | None:
        try:
            return None if one is None else one.decode()
        except UnicodeDecodeError:
            return None

    return pa.array([text(one) for one in found.to_pylist()], pa.string())


@functools.lru_cache(maxsize=64)
def _field_reader(paths: tuple[str, ...]) -> Callable[[bytes | None], str | None]:
    """Reads the fields at some paths of a JSON value: only these are decoded, the rest is skipped by the library."""
    places = [path.split(".") for path in paths]
    decoders = [(_decoder(place), _decoder(["payload", *place])) for place in places]

    def read(value: bytes | None) -> str | None:
        if value is None:
            return None
        labels = []
        for plain, within in decoders:
            label = _decoded(plain, value)
            if label is None:
                label = _decoded(within, value)
            if label is None:
                return None
            labels.append(label)
        return ".".join(labels)

    return read


def _decoded(decode: Callable[[bytes], Any], value: bytes) -> str | None:
    try:
        found = decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    while isinstance(found, msgspec.Struct):
        found = found.inner  # type: ignore[attr-defined]
    return None if found is None else str(found)


def _decoder(place: Sequence[str]) -> Callable[[bytes], Any]:
    """Decodes the field at a place, as nested structures with one field each."""
    inner: Any = str | int | None
    for name in reversed(place):
        inner = msgspec.defstruct("Inner", [("inner", inner, None)], rename={"inner": name}) | None
    return msgspec.json.Decoder(inner).decode
