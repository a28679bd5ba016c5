"""The demo's tables against the truth. The truth comes from the generator alone, and ``deltalake`` lists the files.

A million rows are compared as Arrow columns, which takes a second or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from strandline.cli.demo.changes import ORDER, VALUE, Change, DemoWorkload, changes
from strandline.cli.demo.processes import DemoFolder
from strandline.model.records import Op

_CHANGE: Final = pa.schema({"key": pa.binary(), "value": pa.binary()})
_NUMBER: Final = (len(b"order-"), 32)
"""Where the number of an order is in its key."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The state after all changes, and each producer's changes in order; a change without a value deletes its key."""

    latest: dict[bytes, bytes]
    produced: tuple[pa.Table, ...]

    @property
    def records(self) -> int:
        """Number of changes."""
        return sum(made.num_rows for made in self.produced)


def truth(workload: DemoWorkload) -> Truth:
    """Compute the truth from the generator alone."""
    latest: dict[bytes, bytes] = {}
    produced = []
    for producer in range(workload.producers):
        made = list(changes(workload, producer))
        latest |= folded(made)  # producers share no key
        produced.append(as_table(made))
    return Truth(latest, tuple(produced))


def folded(made: Iterable[Change]) -> dict[bytes, bytes]:
    """The latest value of each key, from changes in order."""
    latest: dict[bytes, bytes] = {}
    for key, value in made:
        if value is None:
            latest.pop(key, None)
        else:
            latest[key] = value
    return latest


def as_table(made: Sequence[Change]) -> pa.Table:
    """Changes as an Arrow table with the columns ``key`` and ``value``."""
    keys, values = zip(*made, strict=True) if made else ((), ())
    return pa.table({"key": keys, "value": values}, schema=_CHANGE)


# --- the latest value of each key ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateDifference:
    """Differences of a table of latest values, in keys; ``doubled`` counts rows of a key beyond its first."""

    rows: int
    missing: int
    extra: int
    different: int
    doubled: int

    @property
    def exact(self) -> bool:
        """Whether the table equals the truth."""
        return not (self.missing or self.extra or self.different or self.doubled)


def compare_state(keys: Sequence[bytes], values: Sequence[bytes], latest: Mapping[bytes, bytes]) -> StateDifference:
    """Compare the rows of a table of latest values.

    >>> compare_state([b"a", b"a", b"c"], [b"0", b"0", b"3"], {b"a": b"1", b"b": b"2"})
    StateDifference(rows=3, missing=1, extra=1, different=1, doubled=1)
    """
    found = dict(zip(keys, values, strict=True))
    return StateDifference(
        rows=len(keys),
        missing=len(latest.keys() - found.keys()),
        extra=len(found.keys() - latest.keys()),
        different=sum(latest[key] != value for key, value in found.items() if key in latest),
        doubled=len(keys) - len(found),
    )


# --- all changes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangesDifference:
    """Differences of a table of all changes, by offset; ``disordered`` counts producers whose changes differ."""

    rows: int
    lost: int
    doubled: int
    disordered: int

    @property
    def exact(self) -> bool:
        """Whether the table equals the truth."""
        return not (self.lost or self.doubled or self.disordered)


def compare_changes(stored: pa.Table, expected: Truth) -> ChangesDifference:
    """Compare a table of all changes, ordered by offset: each offset once, each producer's changes in order."""
    offsets = pc.unique(stored["offset"])
    is_known = pc.and_(pc.greater_equal(offsets, 0), pc.less(offsets, expected.records))
    producers = producers_of(stored["key"], len(expected.produced))
    return ChangesDifference(
        rows=stored.num_rows,
        lost=expected.records - (pc.sum(is_known).as_py() or 0),
        doubled=stored.num_rows - len(offsets),
        disordered=sum(
            not stored.filter(pc.equal(producers, producer)).select(_CHANGE.names).equals(made)
            for producer, made in enumerate(expected.produced)
        ),
    )


def producers_of(keys: pa.ChunkedArray, producers: int) -> pa.ChunkedArray:
    """The producer of each key.

    >>> producers_of(pa.chunked_array([[b"order-0000007", b"order-0000011"]]), 3).to_pylist()
    [1, 2]
    """
    numbers = pc.cast(pc.cast(pc.binary_slice(keys, *_NUMBER), pa.string()), pa.int64())
    return pc.subtract(numbers, pc.multiply(pc.divide(numbers, producers), producers))


# --- the comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """The tables against the truth. ``naive_state`` is the latest value of each key in the naive table."""

    keys: int
    orders: StateDifference
    changes: ChangesDifference
    naive: ChangesDifference
    naive_state: StateDifference

    @property
    def exact(self) -> bool:
        """Whether all tables that follow the log equal the truth."""
        return self.orders.exact and self.changes.exact

    @property
    def naive_exact(self) -> bool:
        """Whether the naive table equals the truth by chance."""
        return self.naive.exact and self.naive_state.exact


def compare(folder: DemoFolder, expected: Truth) -> Comparison:
    """Read the files that ``deltalake`` lists of all tables, and compare them with the truth."""
    orders = _rows(folder.orders, "_key", *ORDER.names)
    stored, naive = _changes(folder.changes), _changes(folder.naive)
    latest = folded(zip(naive["key"].to_pylist(), naive["value"].to_pylist(), strict=True))
    return Comparison(
        keys=len(expected.latest),
        orders=compare_state(orders["_key"].to_pylist(), values_of(orders).to_pylist(), expected.latest),
        changes=compare_changes(stored, expected),
        naive=compare_changes(naive, expected),
        naive_state=compare_state(list(latest), list(latest.values()), expected.latest),
    )


def _rows(table: str, *columns: str) -> pa.Table:
    from deltalake import DeltaTable

    # Not to_pyarrow_table: its threads call Python, and if one still does when Python ends, the process aborts.
    return parquet.read_table(DeltaTable(table).file_uris(), columns=list(columns), partitioning=None)


def _changes(table: str) -> pa.Table:
    rows = _rows(table, "offset", "op", "key", "value").sort_by("offset")
    values = pc.if_else(pc.equal(rows["op"], Op.PUT), rows["value"], None)
    return pa.table({"offset": rows["offset"], "key": rows["key"], "value": values})


def values_of(rows: pa.Table) -> pa.ChunkedArray:
    """The values that the rows of a typed table were decoded from; null where a column is.

    >>> order = {"order": [7], "status": ["created"], "version": [1], "customer": [3], "total": ["0.50"], "note": [""]}
    >>> values_of(pa.table(order)).to_pylist()
    [b'{"order":7,"status":"created","version":1,"customer":3,"total":0.50,"note":""}']
    """
    first, *between = VALUE.replace("%d", "%s").split("%s")
    parts: list[Any] = [first]
    for name, text in zip(ORDER.names, between, strict=True):
        parts += [pc.cast(rows[name], pa.string()), text]
    return pc.cast(pc.binary_join_element_wise(*parts, ""), pa.binary())
