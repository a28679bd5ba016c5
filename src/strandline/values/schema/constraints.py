"""Constraints of values: the keywords of a JSON Schema that codecs enforce, in the form that a log records.

The constraints of a value are a tree of plain JSON beside its columns. A struct has ``required`` (fields that must be
there), ``nullable`` (those of them that may be null), ``additionalProperties`` (false: no unknown fields) and
``properties`` (constraints by field); a list and a map have ``items``; single values have the keywords of JSON Schema.
No part says what the column's type says already, so equal constraints are equal trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.values.schema.evolution import is_list, is_text

Constraints: TypeAlias = Mapping[str, Any]
"""The constraints of a value or of a field; an empty mapping allows all values of the type."""

_KEYWORDS: Final = frozenset(
    (
        *("enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "contains", "minContains"),
        *("maxContains", "prefixItems", "additionalItems", "unevaluatedItems", "required", "minProperties"),
        *("maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "dependentRequired"),
        *("dependentSchemas", "dependencies", "allOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that constrain values. Others define columns, or are annotations, as unknown ones are."""
_OFF: Final = ("uniqueItems", "required")
"""Those that allow everything when they are false or empty."""
_MAX_INT64: Final = 2**63 - 1
MAX_FLOAT32: Final = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Constrained:
    """Columns of a value with their constraints, and a keyword of the given schema that cannot be enforced, if any."""

    schema: pa.Schema
    constraints: Constraints = field(default_factory=dict)
    unenforced: str | None = field(default=None, compare=False)


def place(path: str) -> str:
    """A field, or the whole value, as messages name it."""
    return f"field '{path[:100]}'" if path else "value"


def constraining(schema: Mapping[str, Any]) -> list[str]:
    """The keywords of one part of a JSON Schema that constrain its values."""
    found = [word for word in schema if word in _KEYWORDS and (schema[word] or word not in _OFF)]
    is_closed = "properties" in schema and schema.get("additionalProperties") is False
    return [*found, "additionalProperties"] if is_closed else found


def constraints_of(kind: pa.DataType, schema: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The constraints that one part of a JSON Schema has for a column, and the first keyword that is not enforced.

    >>> constraints_of(pa.int64(), {"exclusiveMinimum": 0, "maximum": 9.5})
    ({'minimum': 1, 'maximum': 9}, None)
    >>> constraints_of(pa.list_(pa.int64()), {"uniqueItems": True})
    ({}, 'uniqueItems')
    """
    found: dict[str, Any] = {}
    for word in constraining(schema):
        rule = _RULES.get(word)
        made = None if rule is None else rule(kind, word, schema[word])
        if made is None:
            return found, word
        for name, value in made.items():
            found[name] = _TIGHTER[name](found[name], value) if name in found else value
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if bound in found and exclusive in found:  # one of them says all
            del found[bound if _TIGHTER[bound](found[bound], found[exclusive]) == found[exclusive] else exclusive]
    if "enum" in found and (not found["enum"] or len(found) > 1):
        return {}, next((word for word in constraining(schema) if word not in ("enum", "const")), "enum")
    return found, None


def _length(kind: pa.DataType, word: str, value: Any) -> dict[str, Any] | None:
    counted = {"Length": is_text, "Items": is_list, "Properties": pt.is_map}[word[3:]]
    if not counted(kind) or not _is_number(value) or value != int(value) or not 0 <= value <= _MAX_INT64:
        return None
    return {word: int(value)} if value or word.startswith("max") else {}


def _bound(kind: pa.DataType, word: str, value: Any) -> dict[str, Any] | None:
    if not _is_number(value):
        return None
    is_low = word.endswith("inimum")
    if pt.is_floating(kind):
        limit = MAX_FLOAT32 if pt.is_float32(kind) else math.inf
        if abs(value) <= limit:
            return {word: float(value)}
        return {} if (value < 0) == is_low else None
    if not pt.is_integer(kind):
        return None
    exclusive = word.startswith("exclusive")
    if is_low:
        bound = math.floor(value) + 1 if exclusive else math.ceil(value)
    else:
        bound = math.ceil(value) - 1 if exclusive else math.floor(value)
    low, high = int_range(kind)
    if bound <= low if is_low else bound >= high:
        return {}
    return {"minimum" if is_low else "maximum": bound} if low <= bound <= min(high, _MAX_INT64) else None


def _multiple(kind: pa.DataType, word: str, value: Any) -> dict[str, Any] | None:
    """Whole numbers only: a fraction such as 0.1 has no exact multiples among floats."""
    if not (pt.is_integer(kind) or pt.is_floating(kind)) or not _is_number(value) or value != int(value):
        return None
    return {word: int(value)} if 0 < value <= 2**53 else None


def _members(kind: pa.DataType, word: str, value: Any) -> dict[str, Any] | None:
    members = [value] if word == "const" else value
    if not isinstance(members, list):
        return None
    if is_text(kind):
        return {"enum": sorted({one for one in members if isinstance(one, str)})}
    if not pt.is_integer(kind):
        return None
    low, high = int_range(kind)
    whole = {int(one) for one in members if _is_number(one) and one == int(one)}
    fitting = sorted(one for one in whole if low <= one <= high)
    return {"enum": fitting} if not fitting or fitting[-1] <= _MAX_INT64 else None


def _pattern(kind: pa.DataType, word: str, value: Any) -> dict[str, Any] | None:
    """RE2 matches in linear time. What it has no such way for, it refuses: look-around and references to groups."""
    if not is_text(kind) or not isinstance(value, str):
        return None
    try:
        pc.match_substring_regex(pa.array([""]), value)
    except pa.ArrowInvalid:
        return None
    return {word: value}


_RULES: Final[dict[str, Callable[[pa.DataType, str, Any], dict[str, Any] | None]]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _length),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    **dict.fromkeys(("enum", "const"), _members),
    "multipleOf": _multiple,
    "pattern": _pattern,
}
"""Constraints of single values and of lists and maps by keyword: in recorded form, or None if not enforced."""

_TIGHTER: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "minimum": max,
    "maximum": min,
    "enum": lambda one, other: sorted(set(one) & set(other)),
}
"""Two constraints of one name as one."""


def int_range(kind: pa.DataType) -> tuple[int, int]:
    """The least and the greatest number of an integer type."""
    if pt.is_unsigned_integer(kind):
        return 0, 2**kind.bit_width - 1
    return -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def has_pattern(constraints: Constraints) -> bool:
    """Whether a pattern is among the constraints: Arrow checks it, and msgspec all others."""
    inside = [*constraints.get("properties", {}).values(), constraints.get("items", {})]
    return "pattern" in constraints or any(has_pattern(each) for each in inside if each)


def read_constraints(kind: pa.DataType, found: Any) -> Constraints:
    """Recorded constraints; ``LookupError`` for a keyword that is unknown, ``ValueError`` if they are damaged."""
    if not isinstance(found, dict):
        raise ValueError("the constraints of a field are no object")  # noqa: TRY004 - the bytes are wrong
    if pt.is_struct(kind):
        _read_struct(kind, found)
        return found
    inside = {word: value for word, value in found.items() if word != "items"}
    if unknown := [word for word in inside if word not in _RULES]:
        raise LookupError(f"the constraint {unknown[0][:80]!r} is unknown")
    if constraints_of(kind, inside) != (inside, None):
        raise ValueError(f"the constraints {list(inside)!r:.80} do not fit the type {kind}")
    if "items" in found:
        if not (is_list(kind) or pt.is_map(kind)):
            raise ValueError("a single value has no items")
        read_constraints(_item(kind), found["items"])
    return found


def _read_struct(kind: pa.DataType, found: dict[str, Any]) -> None:
    names = {each.name for each in kind}
    for word, value in found.items():
        if word in ("required", "nullable"):
            fits = isinstance(value, list) and all(isinstance(name, str) for name in value) and names.issuperset(value)
        elif word == "additionalProperties":
            fits = value is False
        elif word == "properties":
            fits = isinstance(value, dict) and names.issuperset(value)
            for name in value if fits else ():
                read_constraints(kind.field(name).type, value[name])
        else:
            raise LookupError(f"the constraint {word[:80]!r} is unknown")
        if not fits:
            raise ValueError(f"the constraint {word!r} does not fit the fields")


def _item(kind: pa.DataType) -> pa.DataType:
    return kind.item_type if pt.is_map(kind) else kind.value_type


def tightened(kind: pa.DataType, old: Constraints, new: Constraints, path: str = "") -> str | None:
    """The first new constraint that values of the older ones need not fulfil, with its place; None if there is none.

    ``kind`` is the older type: a field that it lacks is null in older values, and may have any constraint.

    >>> tightened(pa.int64(), {"minimum": 1}, {"minimum": 0}), tightened(pa.int64(), {}, {"minimum": 0}, "id")
    (None, "'minimum' of the field 'id'")
    """
    for word in new:
        if word in ("properties", "items", "nullable"):
            continue
        if not _is_looser(kind, word, old, new):
            return f"'{word}' of the {place(path)}"
    if pt.is_struct(kind):
        begin = f"{path}." if path else ""
        parts = [(f"{begin}{each.name}", each.type, _part(old, each.name), _part(new, each.name)) for each in kind]
    elif is_list(kind) or pt.is_map(kind):
        parts = [(path + "[]", _item(kind), old.get("items", {}), new.get("items", {}))]
    else:
        parts = []
    return next(filter(None, (tightened(inner, was, now, name) for name, inner, was, now in parts)), None)


def _part(constraints: Constraints, name: str) -> Constraints:
    part: Constraints = constraints.get("properties", {}).get(name, {})
    return part


def _is_looser(kind: pa.DataType, word: str, old: Constraints, new: Constraints) -> bool:  # noqa: PLR0911 - by word
    was, now = old.get(word), new[word]
    match word:
        case "required":
            return set(now) <= set(was or ()) and _not_null(new) <= _not_null(old)
        case "minimum" | "exclusiveMinimum":
            return _low(kind, new) <= _low(kind, old)
        case "maximum" | "exclusiveMaximum":
            return _high(kind, new) >= _high(kind, old)
        case "enum":
            return was is not None and set(was) <= set(now)
        case "multipleOf":
            return was is not None and was % now == 0
        case "minLength" | "minItems" | "minProperties":
            return bool(now <= (was or 0))
        case "maxLength" | "maxItems" | "maxProperties":
            return was is not None and now >= was
    return bool(was == now)


def _not_null(constraints: Constraints) -> set[str]:
    return set(constraints.get("required", ())) - set(constraints.get("nullable", ()))


def _low(kind: pa.DataType, constraints: Constraints) -> tuple[float, bool]:
    """The lower bound; of two equal ones the exclusive one is higher."""
    if "exclusiveMinimum" in constraints:
        return constraints["exclusiveMinimum"], True
    return constraints.get("minimum", int_range(kind)[0] if pt.is_integer(kind) else -math.inf), False


def _high(kind: pa.DataType, constraints: Constraints) -> tuple[float, bool]:
    """The upper bound; of two equal ones the exclusive one is lower."""
    if "exclusiveMaximum" in constraints:
        return constraints["exclusiveMaximum"], False
    return constraints.get("maximum", int_range(kind)[1] if pt.is_integer(kind) else math.inf), True
