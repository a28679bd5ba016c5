"""Reading the demo's tables back, by ``deltalake`` alone, and holding them against the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from strandline.cli.demo.generator import Change
from strandline.cli.demo.places import Places
from strandline.cli.demo.story import Results
from strandline.cli.demo.truth import Truth, compare_history, compare_state, folded
from strandline.model.records import Op


def compare(places: Places, expected: Truth) -> Results:
    """All tables of a finished demo against the truth."""
    orders = _rows(places.orders, ["key", "value"])
    history = _rows(places.history, ["offset", "op", "key", "value"]).sort_by("offset")
    naive = _rows(places.naive, ["offset", "op", "key", "value"]).sort_by("offset")
    shown = folded(_changes(naive))
    return Results(
        keys=len(expected.latest),
        orders=compare_state(_list(orders, "key"), _list(orders, "value"), expected),
        history=compare_history(_list(history, "offset"), _changes(history), expected),
        naive=compare_history(_list(naive, "offset"), _changes(naive), expected),
        naive_state=compare_state(list(shown), list(shown.values()), expected),
    )


def _rows(place: str, columns: list[str]) -> pa.Table:
    from deltalake import DeltaTable

    return DeltaTable(place).to_pyarrow_table(columns=columns)


def _list(table: pa.Table, column: str) -> list[Any]:
    values: list[Any] = table.column(column).to_pylist()
    return values


def _changes(table: pa.Table) -> Iterator[Change]:
    columns = (table.column(name).to_pylist() for name in ("op", "key", "value"))
    for op, key, value in zip(*columns, strict=True):
        yield key, value if op == Op.PUT else None
