"""Layout of a table for queries: partitions by values, days or hours, and the order of rows in files; its upkeep.

No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput
from strandline.model.arguments import LONGEST, checked
from strandline.tables.rows.kinds import Kind, taken_rows

if TYPE_CHECKING:
    import numpy as np

PartitionValues: TypeAlias = tuple[Any, ...]
"""The values of a partition, in the order of its fields."""

_TIME: Final = re.compile(r"(day|hour)\((.+)\)", re.DOTALL)
_DAY: Final = 86_400_000_000
_MICROSECONDS: Final = {"day": _DAY, "hour": _DAY // 24}
_FIRST, _LAST = ((one - date(1970, 1, 1)).days for one in (date.min, date.max))
CALENDAR: Final = {
    unit: range(_FIRST * _DAY // size, (_LAST + 1) * _DAY // size) for unit, size in _MICROSECONDS.items()
}
"""The days and hours of the years that many programs know."""
_INT32: Final = range(-(2**31), 2**31)
_MOST_CLUSTERED: Final = 4
_RANK_BITS: Final = 16
_HOUR: Final = 3600


@checked
@dataclass(frozen=True, slots=True)
class Upkeep:
    """How a follower looks after its table between its commits: ``Layout(upkeep=Upkeep(hours=24))``.

    A version that was replaced at most ``hours`` ago keeps its files: queries that read it go on, it can be travelled
    to, and a repair may go back to it. Older ones are removed, and ``"auto"`` means an hour. More hours keep more
    files: a commit a second makes 3,600 versions an hour.
    """

    hours: float = 1.0

    @property
    def seconds(self) -> float:
        """For how long a replaced version is kept: thirty years at most, since dates end somewhere."""
        return min(self.hours * _HOUR, LONGEST)


@checked
@dataclass(frozen=True, slots=True)
class Layout:
    """How the files of a Delta or Iceberg table are kept: for queries, which read only those that can hold their rows.

    ``partition_by`` divides the rows of a table of mode ``append`` or ``history``: each file holds rows of one
    partition. It names columns of the table, or ``day(COLUMN)`` and ``hour(COLUMN)`` of a time, in UTC. In Iceberg
    these are transforms of the partition spec. Delta partitions by columns only: the table gets a column for them,
    such as ``_timestamp_day`` for ``day(_timestamp)``, a date, or ``_timestamp_hour``, a time.

    ``cluster_by`` names up to four columns, for all modes: rows of a file are sorted by one column, or are in Z-order
    of several, so that the statistics of its parts are narrow in each of them.

    ``upkeep="auto"``, or an :class:`Upkeep`, lets the follower look after the table between its commits: it joins small
    files, and removes versions, and files of those, that were replaced an hour ago. It is not recorded in the table.

    >>> Layout(partition_by=["country", "day(_timestamp)"], cluster_by="customer")
    Layout(partition_by=('country', 'day(_timestamp)'), cluster_by=('customer',), upkeep=None)
    """

    partition_by: str | Sequence[str] = ()
    cluster_by: str | Sequence[str] = ()
    upkeep: Upkeep | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        """``InvalidInput`` for a name that is empty, or given twice."""
        for option in ("partition_by", "cluster_by"):
            given = getattr(self, option)
            names = (given,) if isinstance(given, str) else tuple(given)
            if "" in names or len({*names}) < len(names):
                raise InvalidInput(f"{option} has an empty name, or one twice: {list(names)}.")
            object.__setattr__(self, option, names)
        if len(self.cluster_by) > _MOST_CLUSTERED:
            raise InvalidInput(f"cluster_by has {len(self.cluster_by)} columns: name {_MOST_CLUSTERED} at most.")


@dataclass(frozen=True, slots=True)
class PartitionField:
    """A column whose values divide a table, or the days or hours of a time."""

    column: str
    unit: Literal["day", "hour"] | None = None

    @classmethod
    def of(cls, text: str) -> PartitionField:
        """The field by its text.

        >>> PartitionField.of("day(_timestamp)").name, PartitionField.of("country").name
        ('_timestamp_day', 'country')
        """
        found = _TIME.fullmatch(text)
        if found is None:
            return cls(text)
        return cls(found[2], "day" if found[1] == "day" else "hour")

    def __str__(self) -> str:
        """The text that :meth:`of` takes."""
        return self.column if self.unit is None else f"{self.unit}({self.column})"

    @property
    def name(self) -> str:
        """Its name among the partition's."""
        return self.column if self.unit is None else f"_{self.column.removeprefix('_')}_{self.unit}"

    def check(self, schema: pa.Schema) -> None:
        """``InvalidInput`` for a column that cannot divide a table."""
        if self.column not in schema.names:
            raise InvalidInput(
                f"The table has no column {self.column!r} to partition by: its columns are {', '.join(schema.names)}."
            )
        kind = schema.field(self.column).type
        if self.unit is not None:
            if not pt.is_timestamp(kind):
                raise InvalidInput(f"The column {self.column!r} is {kind}, and {self.unit}() is of a time.")
            if self.name in schema.names:
                raise InvalidInput(
                    f"The table has a column {self.name!r}, which is the name of the partitions by {self.unit}: rename "
                    "it, or partition by that column itself."
                )
        elif pt.is_timestamp(kind):
            raise InvalidInput(
                f"The column {self.column!r} is a time, and each would be a partition: write day({self.column}) or "
                f"hour({self.column})."
            )
        elif not (pt.is_string(kind) or pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_date32(kind)):
            raise InvalidInput(
                f"The column {self.column!r} is {kind}: a table is partitioned by text, integers, booleans and dates."
            )


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a table in its format: divides rows into those of single files."""

    fields: tuple[PartitionField, ...]
    cluster: tuple[str, ...]
    as_text: bool
    """Whether the format keeps a partition's values as text, as Delta does: a day or an hour is a column of its own
    there, of the years 1 to 9999, and an empty text or a date of another year is null: there is no text for it."""

    @property
    def names(self) -> list[str]:
        """The names of a partition's values."""
        return [field.name for field in self.fields]

    def recorded(self) -> str:
        """The layout as a table records it."""
        return json.dumps({"partition_by": list(map(str, self.fields)), "cluster_by": list(self.cluster)})

    def columns(self, schema: pa.Schema) -> pa.Schema:
        """The columns of a table with those of its layout; ``InvalidInput`` if it cannot be laid out so."""
        for field in self.fields:
            field.check(schema)
        for name in self.cluster:
            if name not in schema.names or pt.is_nested(schema.field(name).type):
                raise InvalidInput(
                    f"The table has no simple column {name!r} to cluster by: its columns are {', '.join(schema.names)}."
                )
        for field in self.fields if self.as_text else ():
            if field.unit is not None:
                zone = schema.field(field.column).type.tz
                kind = pa.date32() if field.unit == "day" else pa.timestamp("us", zone)
                schema = schema.append(pa.field(field.name, kind))
        return schema

    def completed(self, rows: pa.Table) -> pa.Table:
        """Rows of the table with the values of the layout's columns; nothing to do for partitions that need none."""
        for field in self.fields if self.as_text else ():
            at = rows.schema.get_field_index(field.name)
            kind = rows.schema.field(at)
            if field.unit is not None:
                values = _time_column(rows.column(field.column), field.unit, kind.type)
            elif pt.is_string(kind.type):
                values = _without(rows.column(at), pc.equal(rows.column(at), ""))
            elif pt.is_date32(kind.type):
                values = _without(rows.column(at), _is_far(rows.column(at)))
            else:
                continue
            rows = rows.set_column(at, kind, values)
        return rows

    def divided(self, rows: pa.Table) -> Iterator[tuple[PartitionValues, pa.Table]]:
        """The rows of each partition, ordered for their file; none if there are no rows."""
        rows = self.completed(rows)
        if not rows.num_rows:
            return
        if not self.fields:
            yield (), self.ordered(rows)
            return
        import numpy as np

        keys = [self._keys(field, rows) for field in self.fields]
        codes, first = _coded(keys)
        if len(first) == 1:
            yield self._values(keys, 0), self.ordered(rows)
            return
        together = taken_rows(rows, pa.array(np.argsort(codes, kind="stable")))
        start = 0
        for place, count in zip(first, np.bincount(codes).tolist(), strict=True):
            yield self._values(keys, place), self.ordered(together.slice(start, count))
            start += count

    def partitions(self, rows: pa.Table) -> list[PartitionValues]:
        """The partitions that some rows belong to."""
        rows = self.completed(rows)
        keys = [self._keys(field, rows) for field in self.fields]
        return [self._values(keys, place) for place in _coded(keys)[1]] if rows.num_rows else []

    def _keys(self, field: PartitionField, rows: pa.Table) -> pa.ChunkedArray:
        """What divides the rows: a column, or days or hours since 1970."""
        if self.as_text or field.unit is None:
            column = rows.column(field.name)
            return column if self.as_text or not pt.is_date32(column.type) else column.cast(pa.int32())
        return _units(rows.column(field.column), field.unit, _INT32)

    def _values(self, keys: Sequence[pa.ChunkedArray], row: int) -> PartitionValues:
        values = tuple(key[row].as_py() for key in keys)
        return tuple(map(partition_text, values)) if self.as_text else values

    def ordered(self, rows: pa.Table) -> pa.Table:
        """The rows sorted by the one column of the clustering, or in Z-order of several."""
        if not self.cluster or rows.num_rows <= 1:
            return rows
        if len(self.cluster) == 1:
            return taken_rows(rows, pc.sort_indices(rows, [(self.cluster[0], "ascending")]))
        import numpy as np

        codes = _interleaved([rows.column(name) for name in self.cluster])
        return taken_rows(rows, pa.array(np.argsort(codes, kind="stable")))


def layout_of(layout: Layout | None, kind: Kind, *, as_text: bool) -> FileLayout | None:
    """The layout of a table of a kind, in a format; None if it has none. ``InvalidInput`` if its kind has no such."""
    if layout is None or not (layout.partition_by or layout.cluster_by):
        return None
    if layout.partition_by and kind == "latest":
        raise InvalidInput(
            "A table of the latest rows divides its files by the keys, which merging needs, and has no partitions: "
            "use cluster_by for it, or mode 'append' or 'history'."
        )
    return FileLayout(tuple(map(PartitionField.of, layout.partition_by)), tuple(layout.cluster_by), as_text)


def recorded_layout(text: str | None) -> Layout | None:
    """The layout that a table records; None without one."""
    if text is None:
        return None
    found: Mapping[str, list[str]] = json.loads(text)
    return Layout(found.get("partition_by", ()), found.get("cluster_by", ()))


def divided(layout: FileLayout | None, rows: pa.Table) -> Iterator[tuple[PartitionValues, pa.Table]]:
    """The rows of each file, with the values of its partition."""
    if layout is None:
        yield (), rows
    else:
        yield from layout.divided(rows)


def partitions(layout: FileLayout | None, rows: pa.Table) -> list[PartitionValues]:
    """The partitions that some rows belong to."""
    return [()] if layout is None else layout.partitions(rows)


def partition_text(value: Any) -> str | None:
    """The value of a partition as Delta has it: times in UTC are marked so, since readers are in many zones.

    >>> [partition_text(one) for one in (None, True, -3, date(2026, 1, 5), datetime(2026, 1, 5, 7, tzinfo=UTC))]
    [None, 'true', '-3', '2026-01-05', '2026-01-05T07:00:00.000000Z']
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value.isoformat(" ", timespec="seconds")
        return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
    return value.isoformat() if isinstance(value, date) else str(value)


def _coded(keys: Sequence[pa.ChunkedArray]) -> tuple[np.ndarray, list[int]]:
    """A number for each row, equal where all keys are; and for each number the first row that has it."""
    import numpy as np

    codes = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        found = pc.unique(key)
        codes = codes * len(found) + pc.index_in(key, value_set=found).to_numpy()
        codes = np.unique(codes, return_inverse=True)[1]
    return codes, np.unique(codes, return_index=True)[1].tolist()


def _without(column: pa.ChunkedArray, mask: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(mask, pa.scalar(None, column.type), column)


def _is_far(days: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether a date is of a year that other programs do not know."""
    numbers = days.cast(pa.int32())
    return pc.or_(pc.less(numbers, _FIRST), pc.greater(numbers, _LAST))


def _units(times: pa.ChunkedArray, unit: str, limits: range) -> pa.ChunkedArray:
    """Days or hours since 1970, rounded down; none outside of the limits."""
    numbers = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    whole = (pc.fill_null(numbers, 0).to_numpy() // _MICROSECONDS[unit]).clip(limits.start, limits.stop - 1)
    return pa.chunked_array([pa.array(whole, mask=pc.is_null(numbers).to_numpy())])


def _time_column(times: pa.ChunkedArray, unit: str, kind: pa.DataType) -> pa.ChunkedArray:
    units = _units(times, unit, CALENDAR[unit])
    return units.cast(pa.int32()).cast(kind) if unit == "day" else pc.multiply(units, _MICROSECONDS[unit]).cast(kind)


def _interleaved(columns: Sequence[pa.ChunkedArray]) -> np.ndarray:
    """The place of each row in Z-order: the bits of its ranks, in turn, so that neighbours are near in each column."""
    import numpy as np

    codes = np.zeros(len(columns[0]), np.uint64)
    for place, column in enumerate(columns):
        ranks = pc.rank(column, sort_keys="ascending", tiebreaker="min").to_numpy()
        scaled = ((ranks - 1) << _RANK_BITS) // max(1, len(codes))
        for bit in range(_RANK_BITS):
            shift = np.uint64(bit * len(columns) + len(columns) - 1 - place)
            codes |= ((scaled >> np.uint64(bit)) & np.uint64(1)) << shift
    return codes
