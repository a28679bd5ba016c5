"""What each table must hold, computed from the changes by plain means; and what it holds, read by other libraries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from tests.spark.chaos.driver import JOB_ROWS, catalog_of, is_iceberg

Change = tuple[bytes, int | None]
"""Key and number; without a number it is a delete."""
Rows = Counter[tuple[Any, ...]]


def latest(changes: Iterable[tuple[int, Change]], keep: Callable[[int], bool] = lambda _: True, times: int = 1) -> Rows:
    """Key, offset and number of the newest row of each key."""
    state: dict[bytes, tuple[int, int]] = {}
    for offset, (key, number) in changes:
        if number is None:
            state.pop(key, None)
        elif keep(number):
            state[key] = (offset, number * times)
    return Counter((key, *found) for key, found in state.items())


def history(changes: Iterable[tuple[int, Change]]) -> Rows:
    """Key, number, first offset and end of each version."""
    current: dict[bytes, tuple[int, int]] = {}
    ended: list[tuple[Any, ...]] = []
    for offset, (key, number) in changes:
        if key in current:
            first, old = current.pop(key)
            ended.append((key, old, first, offset))
        if number is not None:
            current[key] = (offset, number)
    return Counter([*ended, *((key, number, first, None) for key, (first, number) in current.items())])


def expected(changes: list[Change]) -> dict[str, Rows]:
    """The rows of all tables."""
    numbered = list(enumerate(changes))
    names = sorted({key.partition(b"/")[0].decode() for key, _ in changes})
    many = {
        f"many {name}": latest([one for one in numbered if one[1][0].startswith(f"{name}/".encode())]) for name in names
    }
    return {
        "append": Counter((offset, int(number is None), key, number) for offset, (key, number) in numbered),
        "latest": latest(numbered),
        "history": history(numbered),
        "transform": latest(numbered, lambda number: number % 3 == 0, 2),
        **many,
    }


COLUMNS = {
    "append": ("_offset", "_op", "_key", "n"),
    "history": ("_key", "n", "_valid_from_offset", "_valid_to_offset"),
    "transform": ("_key", "_offset", "twice"),
}


def held(folder: Path, name: str) -> tuple[Rows, int]:
    """The rows of a table, and how many commits it has had."""
    table, commits = _read(folder, name)
    columns = COLUMNS.get(name, ("_key", "_offset", "n"))
    return Counter(zip(*(table[column].to_pylist() for column in columns), strict=True)), commits


def _read(folder: Path, name: str) -> tuple[pa.Table, int]:
    short = name.removeprefix("many ")
    if name == "append" or (short != name and is_iceberg(short)):
        catalog = catalog_of(folder)
        found = catalog.load_table(f"storm.{short}")
        rows, commits = found.scan().to_arrow(), found.metadata.last_sequence_number
        catalog.close()
        return rows, commits
    delta = DeltaTable(str(folder / "many" / short if short != name else folder / name))
    return delta.to_pyarrow_table(), delta.version()


def differences(found: Rows, truth: Rows) -> list[str]:
    """Rows that are missing, doubled or wrong."""
    missing, more = truth - found, found - truth
    return [f"missing {row}" for row in missing] + [f"too many {row}" for row in more]


def jobs_differ(table: pa.Table, done: int) -> list[str]:
    """What is wrong with the log that numbered jobs were written to; the last one may be there without being noted."""
    keys = [int(key) for key in table["key"].to_pylist()]
    count = len(keys) // JOB_ROWS
    if count not in (done, done + 1):
        return [f"{len(keys)} rows, but {done} jobs of {JOB_ROWS} have succeeded"]
    wrong = [f"row {place} is {key}" for place, key in enumerate(keys, JOB_ROWS) if key != place]
    values = table["value"].to_pylist()
    return wrong + [
        f"value of {key} is {value!r}" for key, value in zip(keys, values, strict=True) if value != b"v%d" % key
    ]
