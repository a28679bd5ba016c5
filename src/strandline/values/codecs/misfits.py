"""Fast checks of single values against their column: a microsecond each, where Arrow takes a hundred to refuse one.

A check never refuses a value that Arrow accepts. Arrow decides about all values that pass.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from strandline.values.codecs.exact import OTHER_YEARS, decimal_fit, year_bounds
from strandline.values.schema.constraints import int_range

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
_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MAX_FLOAT32: Final = 3.4028235677973366e38
"""From here on a number becomes infinite."""
_SHOWN: Final = 60
_MOST_BITS: Final = 128


def misfit_of(kind: pa.DataType, via: pa.DataType | None, load: Callable[[Any], Any] | None) -> Misfit | None:
    """The check of values for a column of this type, built through another type or a function; None without one."""
    if load is not None:
        return _loading(load)
    if via is not None:
        return _times(kind, via) if pt.is_integer(via) else _texts(kind)
    if pt.is_decimal(kind):
        return _decimal(kind)
    if pt.is_integer(kind):
        return _between(*int_range(kind))
    if pt.is_timestamp(kind):
        return _moment(kind)
    return _float if pt.is_float32(kind) else None


def _texts(kind: pa.DataType) -> Misfit | None:
    if pt.is_timestamp(kind):
        return _timestamp(kind)
    return _date if pt.is_date32(kind) else None


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
