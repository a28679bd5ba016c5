"""Proposal of a schema: a JSON Schema made of a sample of values, to be read and edited before it is used. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.values.codecs.structs import Json
from strandline.values.sampled import DEEPEST, Sampled, ValueSample, are_decimals
from strandline.values.schema.schemas import as_schema

LEFT_OUT: Final = "x-left-out"
"""The keyword, an annotation, below which a proposal has the fields that it leaves out."""
_MOST_FIELDS: Final = 1_000
_MOST_NOTES: Final = 100
_LONGEST_NAME: Final = 255
_SHOWN: Final = 80
_LINE: Final = 110
"""Letters of a line of the text, roughly."""
_CENTS: Final = 2
_DECIMAL128: Final = 38
_FLOAT_DIGITS: Final = 15
"""Decimal digits that a float of 64 bits keeps."""
_MAP_NAMES: Final = 16
_MAP_SHARE: Final = 4
"""An object is read as a map if it has that many names in all, and a value only one in so many of them."""
_AN_ID: Final = re.compile(r"[0-9]+|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9]{4}-[0-9]{2}-[0-9]{2}")
_FINE_TIME: Final = re.compile(r":[0-9]{2}[.,][0-9]{7}")
_TEXT_TYPES: Final = {
    "date-time": (pa.timestamp("us", "UTC"), re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]")),
    "timestamp[us]": (pa.timestamp("us"), re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]")),
    "date": (pa.date32(), re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}$")),
    "time": (pa.time64("us"), re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}")),
}
"""Formats of text: the column, and how the first text looks. Then the codec itself decodes all of them."""
_Decided: TypeAlias = tuple[dict[str, Any], str]
"""A part of the schema, and why it cannot be a column; empty if it can."""
_EPOCHS: Final = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6}
_EPOCH_RANGE: Final = range(10**9, 22 * 10**8)
"""Seconds since 1970 that look like a time: from 2001 up to 2039."""
_INT64: Final = range(-(2**63), 2**63)


@dataclass(frozen=True)
class SchemaProposal:
    """A proposed schema: all values of the sample decode with it, but for those that :attr:`notes` speak of.

    Save :attr:`text`, edit it, and give it wherever a JSON Schema goes. Nothing is inferred again from then on.
    """

    document: Mapping[str, Any]
    """The JSON Schema."""
    notes: tuple[str, ...]
    """What was ambiguous or does not fit, and why: a sentence each."""
    values: int
    """How many values were looked at, without nulls."""
    unfit: int
    """How many of them the schema cannot decode: dead letters of a table."""
    source: str
    """Where they are from."""

    @property
    def text(self) -> str:
        """The JSON Schema as text."""
        return _written(self.document, 0)

    @cached_property
    def schema(self) -> pa.Schema:
        """Its columns."""
        return as_schema(self.document)


def propose(values: Iterable[bytes | None], source: str) -> SchemaProposal:
    r"""The schema that a sample of values suggests; ``source`` says in it where they are from.

    Types are never narrower than needed and never a guess: a field with several types, and one that was only ever
    null, is left out and named. ``InvalidInput`` if no field can be proposed.

    >>> found = propose([b'{"id": 1, "at": "2026-01-31", "price": "9.50"}', b'{"id": 2, "note": null}'], "two values")
    >>> found.schema.types
    [DataType(int64), DataType(date32[day]), DataType(string)]
    >>> found.document["x-left-out"]["note"]["description"]
    'null wherever it is there (1 of 2 objects)'
    """
    sample = ValueSample(values)
    if not sample.values:
        raise InvalidInput(
            f"There is no value to infer a schema from in {source}{': all are null' if sample.absent else ''}. Append "
            "some first, or write the schema."
        )
    if not sample.root.objects:
        raise InvalidInput(
            f"No value of {source} is a JSON object, of {len(sample.values):,} that were looked at: a schema is for "
            "JSON objects. Name another codec, or keep the values as bytes."
        )
    proposer = _Proposer()
    document = proposer.object("", sample.root)
    if not document.get("properties"):
        raise InvalidInput(
            f"No field of {source} has a type that could be proposed: {' '.join(proposer.notes[:3])[:600]}"
        )
    document = {"description": f"Inferred from {source}; edit it before use.", **document}
    bad = Json(document).decode(pa.array(sample.values, pa.binary())).bad
    notes = (*_notes_on(sample), *_notes_on_bad(bad, len(sample.values)), *proposer.all_notes())
    return SchemaProposal(document, notes, len(sample.values), bad.num_rows, source)


def _notes_on(sample: ValueSample) -> Iterable[str]:
    if sample.absent:
        yield f"{sample.absent:,} records have no value, as deletes have none: they say nothing of the schema."
    if sample.repeated:
        name, count = max(sample.repeated.items(), key=lambda pair: pair[1])
        yield (f"Some objects have a name twice, such as {_shown(name)} ({count:,}): the last one counts.")


def _notes_on_bad(bad: pa.RecordBatch, values: int) -> Iterable[str]:
    if bad.num_rows:
        reason = str(bad.column("reason")[0].as_py())[:200]
        yield (f"{bad.num_rows:,} of {values:,} values do not fit, and will be dead letters; the first one: {reason}")


class _Proposer:
    """Decides for each place of a sample; collects what was ambiguous."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._fields = 0

    def object(self, path: str, seen: Sampled) -> dict[str, Any]:
        """The part of the schema for an object with fields of its own."""
        properties: dict[str, Any] = {}
        left: dict[str, Any] = {}
        refused = self._refused_names(path, seen)
        for name, field in seen.fields.items():
            inside = f"{path}.{name}" if path else name
            part, why = ({}, refused[name]) if name in refused else self.part(inside, field)
            counted = _counted(field, seen.objects)
            if why:
                if len(left) < _MOST_NOTES and not _is_odd(name):
                    kind = {"type": part["type"]} if "type" in part else {}
                    left[name] = {**kind, "description": f"{why} ({counted})"}
                self._note(inside, f"is left out: {why}.")
                continue
            self._fields += 1
            if field.present < seen.objects:
                part["type"] = [part["type"], "null"]
            told = f"{counted}{'; ' if part.get('description') else ''}{part.pop('description', '')}"
            properties[name] = {"type": part.pop("type"), **part, "description": told}
        found: dict[str, Any] = {"type": "object"}
        if properties:
            found["properties"] = properties
        if left:
            found[LEFT_OUT] = left
        if seen.is_cut:
            self._note(
                path or None, f"has further names, or is deeper than {DEEPEST} levels, and that was not looked at."
            )
        return found

    def part(self, path: str, seen: Sampled) -> _Decided:
        """The part for one place, and why it cannot be a column, if so."""
        kinds = seen.kinds
        if not kinds:
            return {"type": "null"}, "null wherever it is there" if seen.nulls else "never there"
        if len(kinds) > 1:
            shares = " and ".join(f"{kind} ({count:,})" for kind, count in kinds.items())
            return {"type": list(kinds)}, f"its values are {shares}, and a column has one type"
        decide = {
            "boolean": lambda _path, _seen: ({"type": "boolean"}, ""),
            "integer": self._integer,
            "number": self._number,
            "string": self._text,
            "array": self._list,
            "object": self._map_or_object,
        }
        [kind] = kinds
        return decide[kind](path, seen)

    def all_notes(self) -> Iterator[str]:
        """What was ambiguous, up to a number that can be read."""
        yield from self.notes[:_MOST_NOTES]
        if len(self.notes) > _MOST_NOTES:
            yield f"There are {len(self.notes) - _MOST_NOTES:,} further notes on fields."

    def _note(self, path: str | None, sentence: str) -> None:
        self.notes.append(f"The {'value' if path is None else f'field {_shown(path)}'} {sentence}")

    def _refused_names(self, path: str, seen: Sampled) -> dict[str, str]:
        """Names that no column can have, with the reason; the rarer of two that differ only in case."""
        refused: dict[str, str] = {}
        twins: dict[str, str] = {}
        often = sorted(seen.fields, key=lambda name: -seen.fields[name].present)
        for name in often:
            if _is_odd(name):
                refused[name] = "its name is empty, too long or not printable"
            elif not path and name.startswith("_"):
                refused[name] = "its name begins with an underscore, as columns that tables add do"
            elif name.casefold() in twins:
                refused[name] = f"its name differs from {_shown(twins[name.casefold()])} in case only"
            elif len(twins) + self._fields >= _MOST_FIELDS:
                refused[name] = f"there are more than {_MOST_FIELDS:,} fields, and others are there more often"
            else:
                twins[name.casefold()] = name
        return refused

    def _integer(self, path: str, seen: Sampled) -> _Decided:
        low, high = seen.low or 0, seen.high or 0
        told = f"from {low} to {high}"
        if low not in _INT64 or high not in _INT64:
            if low >= 0 and high < 2**64:
                return {"type": "integer", "format": "uint64", "description": told}, ""
            self._note(path, "has whole numbers of more than 64 bits: as floats they lose digits.")
            return {"type": "number", "description": f"{told}: more than 64 bits, so that digits are lost"}, ""
        for unit, factor in _EPOCHS.items():
            if low // factor in _EPOCH_RANGE and high // factor in _EPOCH_RANGE:
                first, last = (datetime.fromtimestamp(number // factor, UTC).date() for number in (low, high))
                self._note(path, f"may be a time in {unit} since 1970 ({first} to {last}), or a number: it stays one.")
                told = f"{told}; if it is a time in {unit}, {first} to {last}"
        return {"type": "integer", "description": told}, ""

    def _number(self, path: str, seen: Sampled) -> _Decided:
        if seen.unbounded:
            return {"type": "number"}, f"{seen.unbounded:,} of its numbers are too large for a float of 64 bits"
        part: dict[str, Any] = {"type": "number"}
        if seen.whole and max(abs(seen.low or 0), abs(seen.high or 0)) > 2**53:
            self._note(path, "has fractions, and whole numbers above 2^53: as floats those lose digits.")
        if seen.fractions and seen.places == _CENTS and seen.digits + seen.places <= _FLOAT_DIGITS:
            part["description"] = f"as a decimal: {_decimal(seen)}"
        return part, ""

    def _text(self, path: str, seen: Sampled) -> _Decided:
        part: dict[str, Any] = {"type": "string"}
        if are_decimals(seen.texts):
            self._note(path, f"is text and always a number with a fraction: it stays text; {_decimal(seen)} is exact.")
            return {**part, "description": f"always a number; as a decimal: {_decimal(seen)}"}, ""
        form = _text_format(seen.texts)
        if form == "timestamp[us]":
            self._note(path, 'is always a time without a zone: it stays text; "format": "timestamp[us]" is a time.')
            return {**part, "description": 'always a time without a zone; as a time: "format": "timestamp[us]"'}, ""
        if form in ("date-time", "time") and any(map(_FINE_TIME.search, seen.texts)):
            self._note(path, "is a time finer than a microsecond, which tables round: it stays text.")
            return {**part, "description": f'finer than a microsecond; as a time: "format": "{form}"'}, ""
        if form is None:
            return part, ""
        others = "; in UTC, whatever its zone" if form == "date-time" else ""
        return {**part, "format": form, "description": f"always of this format{others}"}, ""

    def _list(self, path: str, seen: Sampled) -> _Decided:
        if seen.items is None or not (seen.items.present or seen.items.nulls):
            return {"type": "array"}, "an empty list wherever it is there"
        part, why = self.part(f"{path}[]", seen.items)
        if why:
            return {"type": "array", "items": part}, f"of its items: {why}"
        return {"type": "array", "items": part}, ""

    def _map_or_object(self, path: str, seen: Sampled) -> _Decided:
        if not seen.fields:
            deep = f"deeper than {DEEPEST} levels" if seen.is_cut else "an empty object wherever it is there"
            return {"type": "object"}, deep
        if (found := self._as_map(path, seen)) is not None:
            return found, ""
        before = len(self.notes)
        found = self.object(path, seen)
        if "properties" not in found:
            del self.notes[before:]  # the object's own says it
            return found, "none of its fields can be a column"
        return found, ""

    def _as_map(self, path: str, seen: Sampled) -> dict[str, Any] | None:
        """A map, if names look like data: ids, or many of which each object has few; None if its items differ."""
        names, filled = len(seen.fields), sum(field.present + field.nulls for field in seen.fields.values())
        are_ids = names > 1 and all(map(_AN_ID.fullmatch, seen.fields))
        if not are_ids and not (names >= _MAP_NAMES and names * seen.objects >= _MAP_SHARE * filled):
            return None
        together = Sampled()
        for field in seen.fields.values():
            together.merge(field)
        before = len(self.notes), self._fields
        item, why = self.part(f"{path}{{}}", together)
        if why:
            del self.notes[before[0] :]
            self._fields = before[1]
            return None
        told = f"{names:,} different names in {seen.objects:,} objects"
        self._note(path, f"has {told}: it is read as a map; if those are fields, name them under properties.")
        return {"type": "object", "additionalProperties": item, "description": f"a map: {told}"}


def _text_format(texts: list[str]) -> str | None:
    """The format of which all texts are, by the codec's own decoding."""
    for form, (kind, looks) in _TEXT_TYPES.items():
        if all(map(looks.match, texts)):
            values = pa.array([msgspec.json.encode({"v": text}) for text in texts], pa.binary())
            if not Json(pa.schema({"v": kind})).decode(values).bad.num_rows:
                return form
    return None


def _decimal(seen: Sampled) -> str:
    digits = max(seen.digits, *(len(str(abs(number or 0))) for number in (seen.low, seen.high)))
    precision = max(12, digits + seen.places + 3)
    return f'"format": "decimal{128 if precision <= _DECIMAL128 else 256}({min(76, precision)}, {seen.places})"'


def _written(value: Any, indent: int) -> str:
    """A part of the document as text: on one line if it fits there."""
    text = _json(value)
    if not isinstance(value, dict) or not value or len(text) + indent <= _LINE:
        return text
    inside = [f"{' ' * indent}  {_json(name)}: {_written(one, indent + 2)}" for name, one in value.items()]
    return "{\n" + ",\n".join(inside) + "\n" + " " * indent + "}"


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _counted(seen: Sampled, objects: int) -> str:
    """In how many objects a field is."""
    told = f"{seen.present + seen.nulls:,} of {objects:,} objects"
    return f"{told}, {seen.nulls:,} of them null" if seen.nulls and seen.present else told


def _is_odd(name: str) -> bool:
    return not name.isprintable() or not 0 < len(name.encode()) <= _LONGEST_NAME


def _shown(name: str) -> str:
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
    return f"'{shown}'" if shown.isprintable() else ascii(shown)
