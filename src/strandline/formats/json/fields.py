"""Field-by-field reader for a small JSON object from another process; errors name the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

import msgspec

from strandline.errors import InvalidInput, StrandlineError
from strandline.model import json_values as values
from strandline.model.addresses import PLAIN_NAME
from strandline.model.arguments import LARGEST_NUMBER, Natural, Signed
from strandline.model.cursor import Cursor
from strandline.model.head import SourceProof
from strandline.model.json_values import PlainName, fingerprint_of, fingerprint_text

T = TypeVar("T")

LARGEST_REQUEST: Final = 64 << 10
"""Larger requests are refused unread."""
_LONGEST_TEXT: Final = 1 << 16

_PLAIN_NAME_RULE: Final = f"Expected `str` matching regex {PLAIN_NAME!r}"
_SECONDS: Final = Annotated[float, msgspec.Meta(ge=0, le=float(LARGEST_NUMBER))]


class Fields:
    """The fields of an object. Each method returns a field as the type that it names, or raises the given error.

    A field that is missing is null. ``maybe_`` methods return None for null.

    >>> fields = Fields.parse(b'{"upto": 7}', "the ticket")
    >>> fields.maybe_natural("upto"), fields.flag("follow"), fields.maybe_text("since")
    (7, False, None)
    """

    def __init__(self, fields: object, what: str, *, wrong: type[StrandlineError] = InvalidInput) -> None:
        """Read ``fields``; errors are of class ``wrong`` and begin with ``what``."""
        self._what = what
        self._wrong = wrong
        if not isinstance(fields, Mapping):
            raise self.refused("it is no object")
        self._fields: Mapping[str, Any] = fields

    @classmethod
    def parse(
        cls,
        data: bytes | memoryview,
        what: str,
        *,
        largest: int = LARGEST_REQUEST,
        wrong: type[StrandlineError] = InvalidInput,
    ) -> Fields:
        """The object in these bytes."""
        try:
            return cls(values.parse_json(data, largest), what, wrong=wrong)
        except ValueError as error:
            raise wrong(f"{what} cannot be read: {str(error)[:200]}.") from error

    def refused(self, why: str) -> StrandlineError:
        """The error for fields that are wrong in another way."""
        return self._wrong(f"{self._what} cannot be read: {why.replace(_PLAIN_NAME_RULE, 'it is no plain name')}.")

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def only(self, *names: str) -> Fields:
        """Itself; refuses unknown fields, which may request something unsupported."""
        unknown = sorted(set(self._fields) - set(names))
        if unknown:
            raise self.refused(f"it has {str(unknown)[:200]}, and only {list(names)} are known")
        return self

    def record(self, kind: type[T], **given: Any) -> T:
        """A dataclass by its type hints, as :func:`~strandline.model.json_values.read_record` reads it."""
        fields = {field.name: self._fields.get(field.name) for field in fields_of(kind)}  # type: ignore[arg-type]
        for name, value in fields.items():
            if isinstance(value, str) and len(value) > _LONGEST_TEXT:
                raise self.refused(f"{name!r} has more than {_LONGEST_TEXT} letters")
        return self.decoded(lambda _: values.read_record(kind, fields, **given))

    def decoded(self, decode: Callable[[Mapping[str, Any]], T]) -> T:
        """The value that ``decode`` returns for all fields; its errors become the given error."""
        try:
            return decode(self._fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.refused(str(error)[:200] or type(error).__name__) from error

    def _read(self, name: str, kind: Any, read: Callable[[Any], T]) -> T:
        try:
            return read(msgspec.convert(self._fields.get(name), kind))
        except ValueError as error:
            raise self.refused(f"{name!r}: {error}") from error

    def natural(self, name: str) -> int:
        """An integer from 0 on that fits 63 bits."""
        return self._read(name, Natural, int)

    def maybe_natural(self, name: str) -> int | None:
        """An integer as :meth:`natural` reads it; None if the field is missing."""
        return self.natural(name) if name in self else None

    def whole(self, name: str) -> int:
        """A signed 64-bit integer."""
        return self._read(name, Signed, int)

    def seconds(self, name: str) -> float:
        """A number that is finite and not negative."""
        return self._read(name, _SECONDS, float)

    def text(self, name: str, *, longest: int = 4096) -> str:
        """A string of up to ``longest`` letters."""
        return self._read(name, Annotated[str, msgspec.Meta(max_length=longest)], str)

    def name(self, name: str) -> str:
        """A plain name of a replica, a node or a snapshot; never a path."""
        return self._read(name, PlainName, str)

    def maybe_text(self, name: str, *, longest: int = 4096) -> str | None:
        """A string as :meth:`text` reads it; None if the field is missing."""
        return self.text(name, longest=longest) if name in self else None

    def flag(self, name: str) -> bool:
        """True or false; false if it is missing."""
        return self._read(name, bool | None, bool)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(value, self._what, wrong=self._wrong) for value in self._read(name, list[Any], list)]

    def uuid(self, name: str) -> UUID:
        """A UUID."""
        return self._read(name, str, UUID)

    def cursor(self, name: str) -> Cursor:
        """A cursor as text."""
        return self._read(name, Any, values.cursor)

    def maybe_cursor(self, name: str) -> Cursor | None:
        """A cursor as text; None if the field is missing."""
        return self.cursor(name) if name in self else None

    def maybe_proof(self, name: str) -> SourceProof | None:
        """The proof of an ingested source, or None."""
        return self._read(name, str, SourceProof.parse) if name in self else None


def cursor_fields(cursor: Cursor) -> dict[str, Any]:
    """A cursor as the fields of a snapshot's manifest or pointer."""
    fields: dict[str, Any] = {"log_id": str(cursor.log_id), "next": cursor.next, "term": cursor.term}
    return fields if cursor.fingerprint is None else {**fields, "fingerprint": fingerprint_text(cursor.fingerprint)}


def read_cursor(fields: Mapping[str, Any]) -> Cursor:
    """The cursor in these fields; ``ValueError``, ``KeyError`` or ``TypeError`` for anything else."""
    return values.read_record(Cursor, fields, fingerprint=fingerprint_of(fields.get("fingerprint")))


def write_fields(fields: Mapping[str, Any]) -> bytes:
    """A small object as bytes; UUIDs and cursors as text, dataclasses as objects."""
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False, default=_as_value).encode()


def write_record(record: Any) -> bytes:
    """A dataclass as bytes, for :meth:`Fields.record`."""
    return write_fields(_fields_of(record))


def _fields_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields_of(record)}


def _as_value(value: object) -> object:
    if isinstance(value, UUID | Cursor):
        return str(value)
    if is_dataclass(value):
        return _fields_of(value)
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON.")
