"""Looking after a table that follows a log: describe, verify against the log, rebuild, compact, remove orphans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput, NotFound
from strandline.log.contract import Log
from strandline.log.planning import behind
from strandline.log.reading import read_between
from strandline.model.addresses import Address
from strandline.model.arguments import Named, checked
from strandline.model.cursor import Cursor, Limit
from strandline.model.records import READ_SCHEMA
from strandline.tables.delta.replay import Replayed
from strandline.tables.delta.sink import DeltaSink
from strandline.tables.kinds import Kind, merge_history, merge_latest, taken_rows
from strandline.tables.logged import Value
from strandline.tables.work import assigned, written

GRACE_HOURS: Final = 168
"""Hours for which files are kept that no version names: a slow commit may still name them."""
_FIRST_DIFFERENCES: Final = 10


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table as it is now."""

    url: str
    kind: Kind
    version: int
    rows: int
    files: int
    bytes: int
    columns: tuple[tuple[str, str], ...]
    """Name and type of each."""
    cursor: Cursor | None
    """The follower's cursor, proved by the table's history; None if it has none for the given log."""


@checked
def describe(sink: DeltaSink, log: Log | None = None) -> TableDescription:
    """The table's size and columns; with a log also its cursor, which is ``Diverged`` if others changed the rows."""
    found = sink.description()
    if found is None:
        raise NotFound(f"There is no table at {sink.url}.")
    version, rows, files, size, columns = found
    if log is not None:
        sink.meet(log)
    cursor = None if log is None else sink.cursor(log.log_id)
    return TableDescription(sink.url, sink.mode, version, rows, files, size, columns, cursor)


@dataclass(frozen=True, slots=True)
class TableCheck:
    """Comparison of a table with its log, up to the table's cursor."""

    cursor: Cursor
    rows: int
    missing: int
    """Rows that the log gives and the table does not have."""
    extra: int
    """Rows that the table has and the log does not give."""
    first: tuple[str, ...]
    """The first differences."""

    @property
    def is_right(self) -> bool:
        """Whether there is no difference."""
        return not self.missing and not self.extra


@checked
def verify(sink: DeltaSink, log: Log) -> TableCheck:
    """Compare each row with what the log says, from where the table began up to its cursor. Changes nothing.

    Reads that part of the log and the whole table into memory. ``CursorExpired`` if the log no longer has it.
    """
    sink.meet(log)
    cursor = sink.cursor(log.log_id)
    if cursor is None:
        raise NotFound(f"There is no table at {sink.url}.")
    records = pa.Table.from_batches(read_between(log, sink.start(), cursor.next, None), READ_SCHEMA)
    expected, found = _folded(sink, records), sink.rows()
    names = [field.name for field in expected.schema if not pa.types.is_map(field.type)]
    missing, extra = _differences(expected.select(names), found.select(names))
    examples = [f"missing {row}" for row in missing[:_FIRST_DIFFERENCES]] + [
        f"extra {row}" for row in extra[:_FIRST_DIFFERENCES]
    ]
    return TableCheck(cursor, found.num_rows, len(missing), len(extra), tuple(examples[:_FIRST_DIFFERENCES]))


def _folded(sink: DeltaSink, records: pa.Table) -> pa.Table:
    shape, schema = sink.shape, sink.columns()
    changes = shape.rows(records).rows
    if shape.kind == "append":
        return sink.in_columns(changes)
    wide = sink.changes_in_columns(changes)
    if shape.kind == "latest":
        return merge_latest(schema.empty_table(), wide, shape.names, schema)
    merged = merge_history(schema.empty_table(), wide, shape.names, schema)
    return pa.concat_tables([merged.current, merged.closed])


def _differences(expected: pa.Table, found: pa.Table) -> tuple[list[str], list[str]]:
    """Rows of the one that are not in the other, as often as they are, and the reverse."""
    kinds = {field.name: field.type for field in expected.schema}
    numbers = [name for name, kind in kinds.items() if pa.types.is_integer(kind)]
    keys = [name for name, kind in kinds.items() if pa.types.is_binary(kind)]
    by = [(name, "ascending") for name in (*numbers, *keys)]
    if _sorted(expected, by).equals(_sorted(found.cast(expected.schema), by)):
        return [], []
    ours, theirs = (Counter(str(row) for row in table.to_pylist()) for table in (expected, found))
    return sorted((ours - theirs).elements()), sorted((theirs - ours).elements())


def _sorted(rows: pa.Table, by: Sequence[tuple[str, str]]) -> pa.Table:
    return taken_rows(rows, pc.sort_indices(rows.select([name for name, _ in by]), by))


@checked
def existing(
    url: Address,
    *,
    value: Value | None = None,
    key: str | Sequence[str] = (),
    dead_letters: Address | None = None,
    name: Named = "default",
    options: Mapping[str, str] | None = None,
) -> DeltaSink:
    """The sink of a table that follows a log; what it keeps is recorded in the table.

    ``NotFound`` if there is no table, ``InvalidInput`` if it follows no log.
    """
    sink = DeltaSink(url, name=name, options=options)
    mode = sink.recorded_mode()
    if mode is None:
        raise InvalidInput(f"The table {sink.url} follows no log: it was made by another program.")
    return DeltaSink(url, mode=mode, value=value, key=key, dead_letters=dead_letters, name=name, options=options)


@checked
def rebuild(sink: DeltaSink, log: Log) -> Cursor:
    """Build all rows again from where the table began, and replace the table's in one commit; returns its cursor.

    Readers see the old rows until then. For a table that was damaged or restored, and after a corrected schema or
    transform. ``CursorExpired`` if the log no longer has the offset at which the table began.
    """
    sink.meet(log)
    beginning = log.cursor_at(sink.start())
    spans = log.plan(beginning, Limit(upto=log.end().next))
    upto = behind(beginning, spans[-1]) if spans else beginning
    sink.rebuild(log.log_id, upto, lambda parts: [written(part, own) for part, own in assigned(parts, spans)])
    return upto


@checked
def replay_letters(sink: DeltaSink, log: Log) -> Replayed:
    """Apply the dead letters of a table that can become rows by now, each exactly once, and remove them.

    For after a corrected schema, codec or transform: ``sink`` has the corrected one, and ``dead_letters``. A letter has
    the effect that it would have had at its offset. In a table of the latest values a newer row, or a newer delete,
    wins; in a history the version lies between those before and after it. For that the log is read, from the first
    letter on: letters of records that it no longer retains stay (``expired``), except in a table of all changes, which
    needs the letters alone. Those that still cannot become rows stay, too. Only letters below the table's cursor are
    replayed.

    Safe beside the table's follower, and at every crash: repeat it. ``InvalidInput`` for letters of several logs.

    >>> import tempfile, strandline as sl
    >>> folder = tempfile.mkdtemp()
    >>> log = sl.open(f"{folder}/log", create=True)
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"a", value=b'{"id": 3000000000}').result()
    >>> def sink(kind: pa.DataType) -> sl.DeltaSink:
    ...     codec = sl.Json(pa.schema({"id": kind}))
    ...     return sl.DeltaSink(f"{folder}/table", value=codec, dead_letters=f"{folder}/letters")
    >>> sl.follow(log, sink(pa.int32()), until="end").next
    1
    >>> sl.tables.replay_letters(sink(pa.int64()), log)
    Replayed(applied=1, unreadable=0, expired=0, first_reason='')
    >>> sink(pa.int64()).rows().column("id").to_pylist()
    [3000000000]
    """
    return sink.replay_letters(log)


@checked
def optimize(sink: DeltaSink) -> int:
    """Join small files of a table of all changes; returns by how many files it has fewer. Safe beside its follower.

    Keyed tables are divided by their keys, and each trigger writes their files again: they need no compaction.
    """
    if sink.mode != "append":
        raise InvalidInput(
            f"A table with mode={sink.mode!r} is kept compact by its follower: its files are divided by their keys."
        )
    return sink.compacted()


@checked
def vacuum(sink: DeltaSink, hours: int = GRACE_HOURS) -> int:
    """Remove data files that no version of the last ``hours`` names, such as those of failed jobs; returns how many.

    The table can then be restored only to versions of that time. The cursor's proof is in the table's history, and
    stays. A commit that takes longer than ``hours`` would lose its files: keep them for longer than any job takes.
    """
    if hours < 1:
        raise InvalidInput("Files are kept for an hour at least: a running job may still commit them.")
    return sink.vacuumed(hours)
