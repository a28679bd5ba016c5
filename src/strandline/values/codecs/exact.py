"""Values that Arrow's own conversions change, or end the process with: checked before Arrow sees them.

Arrow reads beyond its tables for a decimal with a large exponent. It writes years of more than four digits wrongly, and
neither Python nor text has them.

The checks of single values (:func:`misfit_of`) take a microsecond each, where Arrow takes a hundred to refuse one. They
never refuse a value that Arrow accepts, and Arrow decides about all values that pass.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import lru_cache
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.values.schema.constraints import int_range
from strandline.values.schema.evolution import is_list

_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY: Final = 86_400
_YEAR_1: Final = -62_135_596_800
_YEAR_10000: Final = 253_402_300_800
_NANOSECONDS: Final = 2**63 - 2 * _DAY * 10**9
"""Two days from the last one: in another time zone, and as text, there is one more."""

OTHER_YEARS: Final = "outside of the years 1 to 9999"

Misfit: TypeAlias = Callable[[Any], str | None]
"""Why a value does not fit; None if it fits, or Arrow has to say."""

_TIMESTAMP: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[ T](?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,9})?)?)?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)?)?",
    re.ASCII,
)
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MAX_FLOAT32: Final = 3.4028235677973366e38
"""From here on a number becomes infinite."""
_SHOWN: Final = 60
_MOST_BITS: Final = 128


@lru_cache(maxsize=256)
def decimal_fit(kind: pa.DataType) -> Callable[[Decimal], Decimal]:
    """The function that gives a number the exponent of the column; ``ArithmeticError`` if it would change the number.

    >>> decimal_fit(pa.decimal128(5, 2))(Decimal("1e1"))
    Decimal('10.00')
    """
    exact = Context(prec=kind.precision, traps=[Inexact, InvalidOperation])
    unit = Decimal((0, (1,), -kind.scale))
    return lambda number: number.quantize(unit, context=exact)


def year_bounds(kind: pa.DataType) -> tuple[int, int]:
    """The first and the last number of a timestamp or date of the years 1 to 9999; nanoseconds reach 1677 to 2262."""
    if pt.is_date32(kind):
        return _YEAR_1 // _DAY, _YEAR_10000 // _DAY - 1
    if kind.unit == "ns":
        return -_NANOSECONDS, _NANOSECONDS
    return _YEAR_1 * _PER_SECOND[kind.unit], _YEAR_10000 * _PER_SECOND[kind.unit] - 1


def has_years(kind: pa.DataType) -> bool:
    """Whether values of the type have a year."""
    return bool(pt.is_timestamp(kind) or pt.is_date32(kind))


def is_in_years(column: pa.Array) -> bool:
    """Whether all timestamps or dates of a column are of the years 1 to 9999."""
    low, high = year_bounds(column.type)
    found = pc.min_max(column.view(pa.int32() if pt.is_date32(column.type) else pa.int64()))
    return found["min"].as_py() is None or bool(low <= found["min"].as_py() and found["max"].as_py() <= high)


def field_of_other_years(name: str, column: pa.Array) -> str | None:
    """The first field with a timestamp or date outside of the years 1 to 9999, by its path; None if there is none."""
    kind: Any = column.type
    if has_years(kind):
        return None if is_in_years(column) else name
    if pt.is_struct(kind):
        inside = [(f"{name}.{field.name}", child) for field, child in zip(kind, column.flatten(), strict=True)]
    elif pt.is_map(kind):
        inside = [(name + "{}", column.items)]
    elif is_list(kind):
        inside = [(f"{name}[]", column.flatten())]
    else:
        return None
    return next((found for part in inside if (found := field_of_other_years(*part)) is not None), None)


def cutting(kind: pa.DataType) -> pc.CastOptions:
    """A cast that cuts finer times off. Not ``safe=False``: that makes other times of those beyond the type's range."""
    return pc.CastOptions(target_type=kind, allow_time_truncate=True)


def misfit_of(  # noqa: PLR0911 - one for each kind of type
    kind: pa.DataType, via: pa.DataType | None, load: Callable[[Any], Any] | None
) -> Misfit | None:
    """The check of values for a column of this type, built through another type or a function; None without one."""
    if load is not None:
        return _loading(load)
    if via is not None:
        if pt.is_integer(via):
            return _times(kind, via)
        return _timestamp(kind) if pt.is_timestamp(kind) else _date if pt.is_date32(kind) else None
    if pt.is_decimal(kind):
        return _decimal(kind)
    if pt.is_integer(kind):
        return _between(*int_range(kind))
    if pt.is_timestamp(kind):
        return _moment(kind)
    return _float if pt.is_float32(kind) else None


def _loading(load: Callable[[Any], Any]) -> Misfit:
    def test(value: Any) -> str | None:
        try:
            load(value)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return str(error)
        return None

    return test


def _timestamp(kind: pa.DataType) -> Misfit:
    match, has_zone, is_outside = _TIMESTAMP.fullmatch, kind.tz is not None, _outside(kind)

    def test(value: str) -> str | None:
        moment = None
        if match(value):
            with suppress(ValueError):
                moment = dt.datetime.fromisoformat(value)
        if moment is None:
            return f"{value[:_SHOWN]!r} is no timestamp (RFC 3339)"
        if (moment.tzinfo is not None) != has_zone:
            return f"{value[:_SHOWN]!r} has {'no' if has_zone else 'a'} zone"
        if is_outside(moment):
            return f"{value[:_SHOWN]!r} is {OTHER_YEARS}, or of those that nanoseconds reach"
        return None

    return test


def _outside(kind: pa.DataType) -> Callable[[dt.datetime], bool]:
    """Whether a moment is before the first minute, or after the last that the column can have."""
    low, high = (bound // (60 * _PER_SECOND[kind.unit]) for bound in year_bounds(kind))

    def test(moment: dt.datetime) -> bool:
        since = moment.replace(tzinfo=dt.UTC) - _EPOCH - (moment.utcoffset() or dt.timedelta(0))
        return not low <= since // dt.timedelta(minutes=1) <= high

    return test


def _moment(kind: pa.DataType) -> Misfit:
    """Times that a library has read."""
    is_outside = _outside(kind)

    def test(value: Any) -> str | None:
        if not isinstance(value, dt.datetime) or not is_outside(value):
            return None
        return f"it is {OTHER_YEARS}, or of those that nanoseconds reach"

    return test


def _date(value: str) -> str | None:
    if _DATE.fullmatch(value):
        with suppress(ValueError):
            dt.date.fromisoformat(value)
            return None
    return f"{value[:_SHOWN]!r} is no date"


def _times(kind: pa.DataType, via: pa.DataType) -> Misfit:
    """Numbers that are times: within a day for a time of day, else within the years 1 to 9999."""
    if pt.is_time(kind):
        return _between(0, 86_400 * (1000 if via == pa.int32() else 1_000_000) - 1)
    return _between(*year_bounds(kind), OTHER_YEARS)


def _between(low: int, high: int, outside: str = "out of range") -> Misfit:
    def test(value: Any) -> str | None:
        return None if type(value) is not int or low <= value <= high else f"{_shown(value)} is {outside}"

    return test


def _shown(value: int) -> str:
    """A number as text; a very long one by its bits, since Python limits how long a number it writes."""
    return str(value) if value.bit_length() <= _MOST_BITS else f"a number of {value.bit_length()} bits"


def _decimal(kind: pa.DataType) -> Misfit:
    fit = decimal_fit(kind)

    def test(value: Any) -> str | None:
        if type(value) is not Decimal:
            return None
        if value.is_finite():
            with suppress(ArithmeticError):
                fit(value)
                return None
        return f"{value:.10e} has no exact value there"

    return test


def _float(value: Any) -> str | None:
    is_too_large = type(value) is float and _MAX_FLOAT32 <= abs(value) < float("inf")
    return f"{value:.3e} is out of range" if is_too_large else None
