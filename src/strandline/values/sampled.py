"""What a sample of JSON values has at each place: which types, how often, in which range. No decision is made here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NoReturn

_WHOLE_TEXT: Final = re.compile(r"-?[0-9]{1,38}")
_DECIMAL_TEXT: Final = re.compile(r"-?([0-9]{1,38})\.([0-9]{1,38})")
DEEPEST: Final = 30
"""Objects and lists inside each other that are looked into; a schema takes two more."""
_MOST_NAMES: Final = 50_000
"""Names that are told apart in all of a sample: hostile values have a new one each."""


class Sampled:
    """What the values have at one place: a field, the items of a list, or the values themselves."""

    __slots__ = (
        *("booleans", "digits", "fields", "fractions", "high", "is_cut", "items", "lists", "low", "nulls", "objects"),
        *("places", "texts", "unbounded", "whole"),
    )

    def __init__(self) -> None:
        self.nulls = self.booleans = self.whole = self.fractions = self.objects = self.lists = 0
        self.texts: list[str] = []
        self.low: int | None = None
        """The least whole number."""
        self.high: int | None = None
        self.unbounded = 0
        """Numbers that no float of 64 bits holds."""
        self.digits = self.places = 0
        """Most digits before and after the point, of numbers with a fraction and of texts that are decimals."""
        self.fields: dict[str, Sampled] = {}
        """By name, in the order in which they were seen."""
        self.items: Sampled | None = None
        self.is_cut = False
        """Whether something deeper, or under one name too many, was not looked at."""

    @property
    def present(self) -> int:
        """How many values there are that are not null."""
        numbers = self.whole + self.fractions + self.unbounded
        return self.booleans + numbers + len(self.texts) + self.objects + self.lists

    @property
    def kinds(self) -> dict[str, int]:
        """How often each type of JSON Schema is there, without null; whole numbers beside others are numbers."""
        numbers = self.whole + self.fractions + self.unbounded
        counts = {
            "boolean": self.booleans,
            "integer" if numbers == self.whole else "number": numbers,
            "string": len(self.texts),
            "object": self.objects,
            "array": self.lists,
        }
        return {kind: count for kind, count in counts.items() if count}

    def merge(self, other: Sampled) -> None:
        """Add what is at another place."""
        for name in ("nulls", "booleans", "whole", "fractions", "objects", "lists", "unbounded"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.texts += other.texts
        self.digits, self.places = max(self.digits, other.digits), max(self.places, other.places)
        for number in (other.low, other.high):
            if number is not None:
                self._range(number)
        for name, field in other.fields.items():
            self.fields.setdefault(name, Sampled()).merge(field)
        if other.items is not None:
            self.items = self.items or Sampled()
            self.items.merge(other.items)
        self.is_cut = self.is_cut or other.is_cut

    def _range(self, number: int) -> None:
        self.low = number if self.low is None else min(self.low, number)
        self.high = number if self.high is None else max(self.high, number)


class ValueSample:
    """The values of a sample, taken apart: :attr:`root` is what the objects among them have."""

    def __init__(self, values: Iterable[bytes | None]) -> None:
        self.root = Sampled()
        self.values: list[bytes] = []
        """Those that are not null."""
        self.absent = 0
        """How many values are null, as that of a delete."""
        self.repeated: dict[str, int] = {}
        """Names that are there twice in one object, with how often."""
        self._names = 0
        for value in values:
            self._add(value)

    def _add(self, value: bytes | None) -> None:
        if value is None:
            self.absent += 1
            return
        self.values.append(value)
        with suppress(ValueError, RecursionError):  # not JSON, not UTF-8, too deep: the codec will say so
            found = json.loads(value.decode(), object_pairs_hook=self._object, parse_constant=_refused)
            if b"\\u" in value:  # half of a letter, which no text has: Python takes it, the codec does not
                json.dumps(found, ensure_ascii=False).encode()
            self._see(self.root, found, 0)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    self.repeated[name] = self.repeated.get(name, 0) + 1
                seen.add(name)
        return found

    def _see(self, at: Sampled, value: Any, depth: int) -> None:
        match value:
            case None:
                at.nulls += 1
            case bool():
                at.booleans += 1
            case int():
                _see_whole(at, value)
            case float():
                _see_fraction(at, value)
            case str():
                _see_text(at, value)
            case dict():
                at.objects += 1
                self._see_fields(at, value, depth)
            case list():
                at.lists += 1
                if depth >= DEEPEST:
                    at.is_cut = at.is_cut or bool(value)
                    return
                at.items = at.items or Sampled()
                for one in value:
                    self._see(at.items, one, depth + 1)

    def _see_fields(self, at: Sampled, found: dict[str, Any], depth: int) -> None:
        for name, value in found.items():
            field = at.fields.get(name)
            if field is None:
                if depth >= DEEPEST or self._names >= _MOST_NAMES:
                    at.is_cut = True
                    continue
                self._names += 1
                field = at.fields[name] = Sampled()
            self._see(field, value, depth + 1)


def _see_whole(at: Sampled, number: int) -> None:
    try:
        float(number)
    except OverflowError:
        at.unbounded += 1
        return
    at.whole += 1
    at._range(number)  # noqa: SLF001 - of this module


def _see_fraction(at: Sampled, number: float) -> None:
    if not math.isfinite(number):
        at.unbounded += 1
        return
    at.fractions += 1
    if found := _DECIMAL_TEXT.fullmatch(repr(number)):
        at.digits, at.places = max(at.digits, len(found[1])), max(at.places, len(found[2].rstrip("0")))


def _see_text(at: Sampled, text: str) -> None:
    at.texts.append(text)
    if _WHOLE_TEXT.fullmatch(text):
        at.digits = max(at.digits, len(text.lstrip("-")))
    elif found := _DECIMAL_TEXT.fullmatch(text):
        at.digits, at.places = max(at.digits, len(found[1])), max(at.places, len(found[2]))


def are_decimals(texts: Iterable[str]) -> bool:
    """Whether all texts are numbers, and one at least has a fraction."""
    texts = list(texts)
    return any(map(_DECIMAL_TEXT.fullmatch, texts)) and all(
        _DECIMAL_TEXT.fullmatch(text) or _WHOLE_TEXT.fullmatch(text) for text in texts
    )


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
