"""A small JSON object that came from elsewhere, read field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from strandline.errors import InvalidInput, StrandlineError
from strandline.model.cursor import Cursor
from strandline.model.json_values import fingerprint_of, fingerprint_text
from strandline.model.names import is_plain_name

LARGEST_NUMBER: Final = (1 << 63) - 1
LARGEST_REQUEST: Final = 64 << 10
"""What others ask for in more bytes is refused unread."""


class Fields:
    """The fields of an object, each of which is what it is asked for as, or the error that says which is not.

    >>> fields = Fields.parse(b'{"upto": 7}', "the ticket")
    >>> fields.maybe_natural("upto"), fields.flag("follow"), fields.maybe_text("since")
    (7, False, None)
    """

    def __init__(self, fields: object, what: str, *, wrong: type[StrandlineError] = InvalidInput) -> None:
        """Read ``fields``, which came as ``what``; whatever is not as it should be raises ``wrong``."""
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
            if len(data) > largest:
                raise ValueError(f"{len(data):,} bytes are more than {largest:,}")  # noqa: TRY301 - one sentence for all
            found = json.loads(bytes(data).decode())
        except (ValueError, RecursionError) as error:
            raise wrong(f"{what} cannot be read: {str(error)[:200] or 'it nests too deep'}.") from error
        return cls(found, what, wrong=wrong)

    def refused(self, why: str) -> StrandlineError:
        """The error for fields that are wrong in another way."""
        return self._wrong(f"{self._what} cannot be read: {why}.")

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def only(self, *names: str) -> Fields:
        """Itself, if it has no fields but these: one that is not known may ask for what is not done."""
        unknown = sorted(set(self._fields) - set(names))
        if unknown:
            raise self.refused(f"it has {str(unknown)[:200]}, and only {list(names)} are known")
        return self

    def natural(self, name: str) -> int:
        """A whole number that fits 63 bits."""
        value = self._fields.get(name)
        if type(value) is not int or not 0 <= value <= LARGEST_NUMBER:
            raise self.refused(f"{name!r} is no whole number in range")
        return value

    def maybe_natural(self, name: str) -> int | None:
        """The same, or None."""
        return self.natural(name) if name in self else None

    def whole(self, name: str) -> int:
        """A whole number that fits 64 bits with its sign."""
        value = self._fields.get(name)
        if type(value) is not int or not -LARGEST_NUMBER - 1 <= value <= LARGEST_NUMBER:
            raise self.refused(f"{name!r} is no whole number in range")
        return value

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of whole numbers that fit 63 bits."""
        values = self._fields.get(name)
        if not isinstance(values, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in values):  # noqa: PLR2004
            raise self.refused(f"{name!r} is no list of pairs")
        if not all(type(number) is int and 0 <= number <= LARGEST_NUMBER for pair in values for number in pair):
            raise self.refused(f"{name!r} has numbers out of range")
        return tuple((first, second) for first, second in values)

    def seconds(self, name: str) -> float:
        """A time that is finite and not negative."""
        value = self._fields.get(name)
        # Not math.isfinite alone: a whole number may be too large even to ask.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST_NUMBER:
            raise self.refused(f"{name!r} is no number of seconds")
        return float(value)

    def text(self, name: str, *, longest: int = 4096) -> str:
        """A text that can be written as UTF-8."""
        value = self._fields.get(name)
        if not isinstance(value, str) or len(value) > longest:
            raise self.refused(f"{name!r} is no text of up to {longest} letters")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half a surrogate
            raise self.refused(f"{name!r} holds broken text") from error
        return value

    def name(self, name: str) -> str:
        """A plain name: of a replica, a node or a snapshot, and never a path."""
        value = self.text(name)
        if not is_plain_name(value):
            raise self.refused(f"{name!r} is {value[:200]!r}, which is no plain name")
        return value

    def maybe_text(self, name: str, *, longest: int = 4096) -> str | None:
        """The same, or None."""
        return self.text(name, longest=longest) if name in self else None

    def flag(self, name: str) -> bool:
        """True or False, and False if it is not there."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refused(f"{name!r} is neither true nor false")
        return bool(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts, or None."""
        if name not in self:
            return None
        values = self._fields[name]
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refused(f"{name!r} is no list of texts")
        return tuple(values)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        values = self._fields.get(name)
        if not isinstance(values, list):
            raise self.refused(f"{name!r} is no list")
        return [Fields(value, self._what, wrong=self._wrong) for value in values]

    def object(self, name: str) -> Fields:
        """An object within it."""
        return Fields(self._fields.get(name), self._what, wrong=self._wrong)

    def uuid(self, name: str) -> UUID:
        """An identifier."""
        text = self.text(name, longest=64)
        try:
            return UUID(text)
        except ValueError as error:
            raise self.refused(f"{name!r} is no identifier") from error

    def cursor(self, name: str) -> Cursor:
        """A cursor as its text."""
        text = self.text(name, longest=128)
        try:
            cursor = Cursor.parse(text)
        except InvalidInput as error:
            raise self.refused(str(error).rstrip(".")) from error
        if max(cursor.next, cursor.term) > LARGEST_NUMBER:
            raise self.refused(f"{name!r} is out of range")
        return cursor

    def maybe_fingerprint(self, name: str) -> int | None:
        """The fingerprint of a batch, or None."""
        try:
            return fingerprint_of(self._fields.get(name))
        except ValueError as error:
            raise self.refused(str(error)) from error

    def maybe_cursor(self, name: str) -> Cursor | None:
        """The same, or None."""
        return self.cursor(name) if name in self else None


def cursor_fields(cursor: Cursor) -> dict[str, Any]:
    """A cursor as the fields that snapshots' manifests and pointers have of it."""
    fields: dict[str, Any] = {"log_id": str(cursor.log_id), "next": cursor.next, "term": cursor.term}
    return fields if cursor.fingerprint is None else {**fields, "fingerprint": fingerprint_text(cursor.fingerprint)}


def read_cursor(fields: Mapping[str, Any]) -> Cursor:
    """The inverse; ``ValueError``, ``KeyError`` or ``TypeError`` for what it never wrote."""
    numbers = (fields["next"], fields["term"])
    if not all(type(number) is int and 0 <= number <= LARGEST_NUMBER for number in numbers):
        raise ValueError(f"{str(numbers)[:80]} are no position and term")
    return Cursor(UUID(fields["log_id"]), *numbers, fingerprint_of(fields.get("fingerprint")))


def write_fields(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a small object."""
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
