"""The expected tables, computed from the generator without the log, and the comparison with the stored tables."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from strandline.cli.demo.folder import DemoFolder
from strandline.cli.demo.generator import Change, Shape, changes, producer_of
from strandline.model.records import Op


@dataclass(frozen=True, slots=True)
class Truth:
    """The state after all changes, and a digest of each producer's changes in order."""

    records: int
    latest: dict[bytes, bytes]
    digests: tuple[str, ...]


def truth(shape: Shape) -> Truth:
    """The truth by the generator alone."""
    latest: dict[bytes, bytes] = {}
    digests = []
    for producer in range(shape.producers):
        made = list(changes(shape, producer))
        latest |= folded(made)  # producers share no key
        digests.append(_digest(made))
    return Truth(shape.records, latest, tuple(digests))


def _digest(made: Iterable[Change]) -> str:
    digest = hashlib.sha256()
    for key, value in made:
        _feed(digest, key, value)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, key: bytes, value: bytes | None) -> None:
    digest.update(b"%d:%s" % (len(key), key))
    digest.update(b"-" if value is None else b"%d:%s" % (len(value), value))


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


def compare_state(keys: Sequence[bytes], values: Sequence[bytes], expected: Truth) -> StateDifference:
    """Compare the rows of a table of latest values.

    >>> expected = Truth(3, {b"a": b"1", b"b": b"2"}, ())
    >>> compare_state([b"a", b"a", b"c"], [b"0", b"0", b"3"], expected)
    StateDifference(rows=3, missing=1, extra=1, different=1, doubled=1)
    """
    found = dict(zip(keys, values, strict=True))
    latest = expected.latest
    return StateDifference(
        rows=len(keys),
        missing=len(latest.keys() - found.keys()),
        extra=len(found.keys() - latest.keys()),
        different=sum(latest[key] != value for key, value in found.items() if key in latest),
        doubled=len(keys) - len(found),
    )


@dataclass(frozen=True, slots=True)
class HistoryDifference:
    """Differences of a table of all changes, by offset; ``disordered`` counts producers whose changes differ."""

    rows: int
    lost: int
    doubled: int
    disordered: int

    @property
    def exact(self) -> bool:
        """Whether the table equals the truth."""
        return not (self.lost or self.doubled or self.disordered)


def compare_history(offsets: Iterable[int], stored: Iterable[Change], expected: Truth) -> HistoryDifference:
    """Compare a table of all changes, ordered by offset: each offset once, each producer's changes in order."""
    counts = Counter(offsets)
    rows = counts.total()
    digests = [hashlib.sha256() for _ in expected.digests]
    for key, value in stored:
        _feed(digests[producer_of(key, len(digests))], key, value)
    return HistoryDifference(
        rows=rows,
        lost=expected.records - sum(1 for offset in counts if 0 <= offset < expected.records),
        doubled=rows - len(counts),
        disordered=sum(found.hexdigest() != wanted for found, wanted in zip(digests, expected.digests, strict=True)),
    )


def folded(stored: Iterable[Change]) -> dict[bytes, bytes]:
    """The latest value of each key, from changes in order."""
    latest: dict[bytes, bytes] = {}
    for key, value in stored:
        if value is None:
            latest.pop(key, None)
        else:
            latest[key] = value
    return latest


@dataclass(frozen=True, slots=True)
class Comparison:
    """The tables against the truth. ``naive_state`` is the latest value of each key in the naive table."""

    keys: int
    orders: StateDifference
    history: HistoryDifference
    naive: HistoryDifference
    naive_state: StateDifference

    @property
    def exact(self) -> bool:
        """Whether both tables that follow the log equal the truth."""
        return self.orders.exact and self.history.exact

    @property
    def naive_exact(self) -> bool:
        """Whether the naive table equals the truth by chance."""
        return self.naive.exact and self.naive_state.exact


def compare(folder: DemoFolder, expected: Truth) -> Comparison:
    """Read all tables with ``deltalake`` alone and compare them with the truth."""
    orders = _rows(folder.orders, "key", "value").to_pydict()
    history = _rows(folder.history, "offset", "op", "key", "value").sort_by("offset")
    naive = _rows(folder.naive, "offset", "op", "key", "value").sort_by("offset")
    latest = folded(_changes(naive))
    return Comparison(
        keys=len(expected.latest),
        orders=compare_state(orders["key"], orders["value"], expected),
        history=compare_history(history["offset"].to_pylist(), _changes(history), expected),
        naive=compare_history(naive["offset"].to_pylist(), _changes(naive), expected),
        naive_state=compare_state(list(latest), list(latest.values()), expected),
    )


def _rows(table: str, *columns: str) -> pa.Table:
    from deltalake import DeltaTable

    return DeltaTable(table).to_pyarrow_table(columns=list(columns))


def _changes(table: pa.Table) -> Iterator[Change]:
    columns = (table[name].to_pylist() for name in ("op", "key", "value"))
    for op, key, value in zip(*columns, strict=True):
        yield key, value if op == Op.PUT else None
