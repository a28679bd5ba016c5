"""What a table should hold by its log, and how its rows differ from that: whole, or in shares that tasks compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.log.contract import LogReading
from strandline.log.read.span_tasks import records_between, run_located, spans_between
from strandline.model.cursor import Span
from strandline.storage.task_pool import TaskPool
from strandline.tables.files.columns import changes_schema, in_schema, narrowed
from strandline.tables.files.data_files import TableFiles
from strandline.tables.files.layout import FEW_SHARES, WHOLE, HashRange, range_of, shares
from strandline.tables.files.part import as_tables
from strandline.tables.rows.hashing import key_hashes
from strandline.tables.rows.kinds import in_offset_order, merged_rows, taken_rows
from strandline.tables.rows.shape import ShapedRows, TableShape

FIRST_DIFFERENCES: Final = 10
"""How many differences are shown."""
_MERGED: Final = 64 << 20
"""Bytes of changes that are merged at once, at least."""


@dataclass(frozen=True, slots=True)
class RowDifferences:
    """Comparison of a table's rows with those that it should have."""

    rows: int
    """How many the table has."""
    missing: int
    """How many the log gives and the table does not have."""
    extra: int
    """How many the table has and the log does not give."""
    first: tuple[str, ...] = ()
    """The first differences."""

    @classmethod
    def counted(cls, rows: int, missing: tuple[int, Sequence[Any]], extra: tuple[int, Sequence[Any]]) -> RowDifferences:
        """Differences from the numbers of missing and extra rows, and the first of each."""
        examples = [f"missing {row}" for row in missing[1][:FIRST_DIFFERENCES]]
        examples += [f"extra {row}" for row in extra[1][:FIRST_DIFFERENCES]]
        return cls(rows, missing[0], extra[0], tuple(examples[:FIRST_DIFFERENCES]))

    def __add__(self, other: RowDifferences) -> RowDifferences:
        """Both shares of a table together."""
        first = sorted((*self.first, *other.first), key=lambda one: one.startswith("extra"))[:FIRST_DIFFERENCES]
        missing, extra = self.missing + other.missing, self.extra + other.extra
        return RowDifferences(self.rows + other.rows, missing, extra, tuple(first))


@dataclass(frozen=True, slots=True)
class ShareTask:
    """Compares one share of a table of files with the records of ``spans``, wherever it runs. Reads only.

    A share is a range of key hashes, or for a table of all changes the rows with offsets ``low`` up to ``high``.
    ``paths`` are the table's data files, as of one version. Files of other keys, by their names, are skipped; a row in
    a file of other keys than its own is an extra one.
    """

    shape: TableShape
    schema: pa.Schema
    files: TableFiles
    paths: tuple[str, ...]
    first: int
    next: int
    share: HashRange | None = None
    low: int | None = None
    high: int | None = None
    spans: tuple[Span, ...] = ()

    def __call__(self) -> RowDifferences:
        """Compare the share."""
        records = as_tables(records_between(self.spans, self.first, self.next))
        rows, strays = self._found()
        found = differences(expected_rows(self.shape, self.schema, records, self.share or WHOLE, self.shape.rows), rows)
        return found + RowDifferences.counted(len(strays), (0, ()), (len(strays), strays))

    def _found(self) -> tuple[pa.Table, list[str]]:
        """The table's rows in the share, and rows in files of other keys."""
        parts, strays = [self.schema.empty_table()], []
        for path in self.paths:
            covered = range_of(path)
            if self.share is None or covered.overlaps(self.share):
                rows = in_schema(self.files.read(path), self.schema)
                parts.append(self._own(rows))
                strays += [f"{row} in {path}, a file of other keys" for row in self._strays(rows, covered)]
        return pa.concat_tables(parts), strays

    def _own(self, rows: pa.Table) -> pa.Table:
        if self.share is not None:
            return self.share.rows_of(rows, self.shape.names.key)
        name = self.shape.names.offset
        if self.low is not None:
            rows = rows.filter(pc.greater_equal(rows.column(name), self.low))
        return rows if self.high is None else rows.filter(pc.less(rows.column(name), self.high))

    def _strays(self, rows: pa.Table, covered: HashRange) -> list[Any]:
        """The rows of a file that neither it nor this share should hold; the task with its lowest hash reports them."""
        if self.share is None or not covered.depth or not self.share.low <= covered.low < self.share.high:
            return []
        hashes = key_hashes(rows.column(self.shape.names.key))
        is_stray = ~(covered.mask(hashes) | self.share.mask(hashes))
        return rows.filter(pa.array(is_stray)).to_pylist() if is_stray.any() else []


def share_tasks(
    shape: TableShape, schema: pa.Schema, files: TableFiles, paths: Iterable[str], held: range, most: int
) -> list[ShareTask]:
    """The comparison of a table's version that holds these offsets, as ``most`` tasks or fewer, without spans yet.

    A task by keys takes the records of all offsets. Rows of a transform may have any offset: one task compares them.
    """
    task = ShareTask(shape, schema, files, tuple(paths), held.start, held.stop)
    if shape.is_keyed:
        return [replace(task, share=share) for share in shares(min(most, FEW_SHARES))]
    if shape.transform is not None:
        return [task]
    step = max(1, -(-len(held) // most))
    cuts = [held.start, *held[step::step], held.stop]
    tasks = [replace(task, first=first, next=end, low=first, high=end) for first, end in pairwise(cuts)]
    # The first and the last one also have the rows before and behind these offsets, which should not be there.
    tasks[0] = replace(tasks[0], low=None)
    tasks[-1] = replace(tasks[-1], high=None)
    return tasks


def compared_shares(log: LogReading, tasks: Iterable[ShareTask], pool: TaskPool, title: str) -> RowDifferences:
    """Run the tasks of a comparison, which have no spans yet; all shares together."""
    found = RowDifferences(0, 0, 0)
    planned = [replace(task, spans=spans_between(log, task.first, task.next)) for task in tasks]
    for _, share in run_located(log, planned, pool, title):
        found += share
    return found


def expected_rows(
    shape: TableShape,
    schema: pa.Schema,
    records: Iterable[pa.Table],
    share: HashRange,
    shaped: Callable[[pa.Table], ShapedRows],
) -> pa.Table:
    """The rows of a share of a table with these columns, by its records: merged as they come, which bounds memory."""
    rows, waiting, size = schema.empty_table(), list[pa.Table](), 0
    for some in records:
        changes = shaped(share.rows_of(some, "key") if shape.has_record_keys else some).rows
        if not shape.has_record_keys:
            changes = share.rows_of(changes, shape.names.key)
        columns = changes_schema(schema, changes.schema, shape.names) if shape.is_keyed else schema
        waiting.append(in_schema(narrowed(changes, columns), columns))
        size += waiting[-1].nbytes
        if size >= max(_MERGED, rows.nbytes):  # a merge of more rows takes longer
            rows, waiting, size = _merged(shape, schema, rows, waiting), [], 0
    rows = _merged(shape, schema, rows, waiting)
    return rows if shape.layout is None else shape.layout.completed(rows)


def _merged(shape: TableShape, schema: pa.Schema, rows: pa.Table, changes: list[pa.Table]) -> pa.Table:
    if shape.kind == "append" or not changes:
        return pa.concat_tables([rows, *changes])
    ordered = in_offset_order(changes, shape.names)
    return pa.concat_tables(merged_rows(shape.kind, rows, ordered, shape.names, schema).values())


def differences(expected: pa.Table, found: pa.Table) -> RowDifferences:
    """Rows of the one that are not in the other, as often as they are, and the reverse. Maps are not compared."""
    names = [field.name for field in expected.schema if not pa.types.is_map(field.type)]
    expected, found = expected.select(names), found.select(names)
    kinds = {field.name: field.type for field in expected.schema}
    numbers = [name for name, kind in kinds.items() if pa.types.is_integer(kind)]
    keys = [name for name, kind in kinds.items() if pa.types.is_binary(kind)]
    by = [(name, "ascending") for name in (*numbers, *keys)]
    if _sorted(expected, by).equals(_sorted(found.cast(expected.schema), by)):
        return RowDifferences(found.num_rows, 0, 0)
    ours, theirs = (Counter(str(row) for row in table.to_pylist()) for table in (expected, found))
    missing, extra = sorted((ours - theirs).elements()), sorted((theirs - ours).elements())
    return RowDifferences.counted(found.num_rows, (len(missing), missing), (len(extra), extra))


def _sorted(rows: pa.Table, by: Sequence[tuple[str, str]]) -> pa.Table:
    return taken_rows(rows, pc.sort_indices(rows.select([name for name, _ in by]), by))
