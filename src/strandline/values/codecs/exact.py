"""Values that Arrow's own conversions change, or end the process with: checked before Arrow sees them.

Arrow reads beyond its tables for a decimal with a large exponent. It writes years of more than four digits wrongly, and
neither Python nor text has them.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.values.schema.evolution import is_list

_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6}
_DAY: Final = 86_400
_YEAR_1: Final = -62_135_596_800
_YEAR_10000: Final = 253_402_300_800
_NANOSECONDS: Final = 2**63 - 2 * _DAY * 10**9
"""Two days from the last one: in another time zone, and as text, there is one more."""

OTHER_YEARS: Final = "outside of the years 1 to 9999"


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
    found = pc.min_max(_numbers(column))
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


def _numbers(column: pa.Array) -> pa.Array:
    return column.view(pa.int32() if pt.is_date32(column.type) else pa.int64())


def cutting(kind: pa.DataType) -> pc.CastOptions:
    """A cast that cuts finer times off. Not ``safe=False``: that makes other times of those beyond the type's range."""
    return pc.CastOptions(target_type=kind, allow_time_truncate=True)
