"""Times of loaded rows: with a zone, and no finer than a microsecond."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput
from strandline.model.records import TIMESTAMP

_FINER: Final = r"\.[0-9]{7,9}"
_A_TIME: Final = "2026-11-01T12:00:00Z"


def as_time(column: pa.ChunkedArray, where: str, *, truncates: bool) -> pa.ChunkedArray:
    """Times in UTC; ``InvalidInput`` for a column that is neither text nor timestamps with a zone."""
    column = _in_microseconds(_fine_texts(column), where, truncates=truncates)
    kind = column.type
    has_zone = pa.types.is_timestamp(kind) and kind.tz is not None
    if not has_zone and not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
        raise InvalidInput(
            f"{where} has times of type {kind}, which has no time zone: give timestamps with a zone, or text "
            f"such as {_A_TIME}."
        )
    try:
        return column.cast(TIMESTAMP)
    except pa.ArrowInvalid as error:  # its message names calls of Arrow
        refused = next((text for text in column.to_pylist() if not _is_time(text)), None)
        raise InvalidInput(
            f"{where} has the time {refused!r:.40}: use one with its zone, such as {_A_TIME}."
        ) from error


def with_short_times(rows: pa.Table, where: str, *, truncates: bool) -> pa.Table:
    """Rows with the columns of records, whose times are no finer than a microsecond."""
    at = rows.schema.get_field_index("timestamp")
    if at < 0:
        return rows
    times = _in_microseconds(rows.column(at), where, truncates=truncates)
    return rows.set_column(at, rows.schema.field(at).with_type(times.type), times)


def _in_microseconds(column: pa.ChunkedArray, where: str, *, truncates: bool) -> pa.ChunkedArray:
    """Times in nanoseconds as microseconds; a finer one is cut if that is asked for, and otherwise ``InvalidInput``."""
    kind = column.type
    if not pa.types.is_timestamp(kind) or kind.unit != "ns":
        return column
    cut = pc.floor_temporal(column, unit="microsecond")
    if not truncates:
        finer = column.filter(pc.not_equal(cut, column))
        if len(finer):
            raise InvalidInput(
                f"{where} has the time {finer[0].cast(pa.string())}, and those of records have microseconds: let finer "
                "times be cut (--truncate-times), or round them in the file."
            )
    return cut.cast(pa.timestamp("us", kind.tz))


def _fine_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text with times of which some are finer than a microsecond, as times; any other column as it is."""
    if not pa.types.is_string(column.type) or not pc.any(pc.match_substring_regex(column, _FINER)).as_py():
        return column
    try:
        return column.cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid:  # nanoseconds reach from 1677 to 2262 only
        return column


def _is_time(text: Any) -> bool:
    try:
        pa.scalar(text).cast(TIMESTAMP)
    except pa.ArrowInvalid:
        return False
    return True
