"""The demo's change stream, fixed by its seed, and the tables that it must lead to, computed without the log.

Orders are created, updated, shipped and deleted. Each producer has keys of its own, so that the order of a key's
changes is defined however the producers interleave.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from strandline.cli.demo.processes import DemoFolder
from strandline.model.records import Op

Change = tuple[bytes, bytes | None]
"""A key and its new value; None deletes it."""

_SHIPPED: Final = 0.2
"""How often a change of an order ships it; a shipped order is deleted next, and its number used again later."""

_NOTES: Final = ("leave at the door", "ring twice", "gift wrapping, please", "back entrance", "call before")

ORDER: Final = pa.schema(
    {
        "order": pa.int64(),
        "status": pa.string(),
        "version": pa.int32(),
        "customer": pa.int32(),
        "total": pa.decimal128(10, 2),
        "note": pa.string(),
    }
)
"""The fields of an order, which are the columns of the typed tables."""
_VALUE: Final = '{"order":%d,"status":"%s","version":%d,"customer":%d,"total":%s,"note":"%s"}'

_ABSENT, _OPEN, _DONE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """The size of the stream: number of changes, keys and producers; and its seed."""

    records: int = 1_000_000
    keys: int = 100_000
    producers: int = 3
    seed: int = 7

    def share(self, producer: int) -> int:
        """Number of changes of one producer.

        >>> [DemoWorkload(records=10).share(producer) for producer in range(3)]
        [4, 3, 3]
        """
        return self.records // self.producers + (producer < self.records % self.producers)


def changes(workload: DemoWorkload, producer: int) -> Iterator[Change]:
    """One producer's changes, in order; the same for the same workload, in every process.

    >>> list(changes(DemoWorkload(records=3, keys=3), 0))[0]
    (b'order-0000000', b'{"order":0,"status":"created","version":1,"customer":0,"total":616.83,"note":"back entrance"}')
    """
    chance = random.Random(f"{workload.seed}/{producer}").random
    numbers = range(producer, workload.keys, workload.producers)
    states = [_ABSENT] * len(numbers)
    versions = [0] * len(numbers)
    for _ in range(workload.share(producer)):
        index = int(chance() * len(numbers))
        number, state = numbers[index], states[index]
        versions[index] += 1
        if state == _DONE:
            states[index] = _ABSENT
            yield b"order-%07d" % number, None
            continue
        if state == _ABSENT:
            status, states[index] = "created", _OPEN
        elif chance() < _SHIPPED:
            status, states[index] = "shipped", _DONE
        else:
            status = "updated"
        cents = int(chance() * 100_000)
        total = f"{cents // 100}.{cents % 100:02}"
        order = (number, status, versions[index], number * 7919 % 9973, total, _NOTES[cents % len(_NOTES)])
        yield b"order-%07d" % number, (_VALUE % order).encode()


def values_of(rows: Mapping[str, Sequence[Any]]) -> list[bytes]:
    """The values that the rows of a typed table were decoded from.

    >>> order = {"order": [7], "status": ["created"], "version": [1], "customer": [3], "total": ["0.50"], "note": [""]}
    >>> values_of(order)
    [b'{"order":7,"status":"created","version":1,"customer":3,"total":0.50,"note":""}']
    """
    return [(_VALUE % order).encode() for order in zip(*(rows[name] for name in ORDER.names), strict=True)]


def producer_of(key: bytes, producers: int) -> int:
    """The producer of a key.

    >>> producer_of(b"order-0000007", 3)
    1
    """
    return int(key.removeprefix(b"order-")) % producers


# --- expected tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Truth:
    """The state after all changes, and a digest of each producer's changes in order."""

    records: int
    latest: dict[bytes, bytes]
    digests: tuple[str, ...]


def truth(workload: DemoWorkload) -> Truth:
    """Compute the truth from the generator alone."""
    latest: dict[bytes, bytes] = {}
    digests = []
    for producer in range(workload.producers):
        made = list(changes(workload, producer))
        latest |= folded(made)  # producers share no key
        digests.append(_digest(made))
    return Truth(workload.records, latest, tuple(digests))


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


def compare_changes(offsets: Iterable[int], stored: Iterable[Change], expected: Truth) -> ChangesDifference:
    """Compare a table of all changes, ordered by offset: each offset once, each producer's changes in order."""
    counts = Counter(offsets)
    rows = counts.total()
    digests = [hashlib.sha256() for _ in expected.digests]
    for key, value in stored:
        _feed(digests[producer_of(key, len(digests))], key, value)
    return ChangesDifference(
        rows=rows,
        lost=expected.records - sum(1 for offset in counts if 0 <= offset < expected.records),
        doubled=rows - len(counts),
        disordered=sum(found.hexdigest() != wanted for found, wanted in zip(digests, expected.digests, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class VersionsDifference:
    """Differences of a table of versions: rows that it lacks, and rows that should not be there."""

    rows: int
    missing: int
    extra: int

    @property
    def exact(self) -> bool:
        """Whether the table equals the truth."""
        return not (self.missing or self.extra)


Version = tuple[bytes, bytes, int, int | None]
"""A key, its value, the offset at which the value began, and that at which it ended (None: it is current)."""


def versions(offsets: Iterable[int], stored: Iterable[Change]) -> Iterator[Version]:
    """The versions of all keys, from changes in order.

    >>> sorted(versions(range(3), [(b"a", b"1"), (b"b", b"2"), (b"a", None)]))
    [(b'a', b'1', 0, 2), (b'b', b'2', 1, None)]
    """
    current: dict[bytes, tuple[bytes, int]] = {}
    for offset, (key, value) in zip(offsets, stored, strict=True):
        before = current.pop(key, None)
        if before is not None:
            yield key, *before, offset
        if value is not None:
            current[key] = value, offset
    for key, (value, began) in current.items():
        yield key, value, began, None


def compare_versions(found: Iterable[Version], expected: Iterable[Version]) -> VersionsDifference:
    """Compare the rows of a table of versions with those that the changes lead to.

    >>> compare_versions([(b"a", b"1", 0, None), (b"a", b"1", 0, None)], [(b"a", b"1", 0, 2)])
    VersionsDifference(rows=2, missing=1, extra=2)
    """
    rows, wanted = Counter(found), Counter(expected)
    return VersionsDifference(rows.total(), (wanted - rows).total(), (rows - wanted).total())


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
    history: VersionsDifference
    changes: ChangesDifference
    naive: ChangesDifference
    naive_state: StateDifference

    @property
    def exact(self) -> bool:
        """Whether all tables that follow the log equal the truth."""
        return self.orders.exact and self.history.exact and self.changes.exact

    @property
    def naive_exact(self) -> bool:
        """Whether the naive table equals the truth by chance."""
        return self.naive.exact and self.naive_state.exact


def compare(folder: DemoFolder, expected: Truth) -> Comparison:
    """Read all tables with ``deltalake`` alone and compare them with the truth."""
    orders = _rows(folder.orders, "_key", *ORDER.names).to_pydict()
    changed = _rows(folder.changes, "offset", "op", "key", "value").sort_by("offset")
    naive = _rows(folder.naive, "offset", "op", "key", "value").sort_by("offset")
    latest = folded(_changes(naive))
    offsets = changed["offset"].to_pylist()
    return Comparison(
        keys=len(expected.latest),
        orders=compare_state(orders["_key"], values_of(orders), expected),
        # The offsets are in no generator: they are those of the changes, which are compared by themselves.
        history=compare_versions(_versions(folder.history), versions(offsets, _changes(changed))),
        changes=compare_changes(offsets, _changes(changed), expected),
        naive=compare_changes(naive["offset"].to_pylist(), _changes(naive), expected),
        naive_state=compare_state(list(latest), list(latest.values()), expected),
    )


def _rows(table: str, *columns: str) -> pa.Table:
    from deltalake import DeltaTable

    return DeltaTable(table).to_pyarrow_table(columns=list(columns))


def _versions(table: str) -> Iterator[Version]:
    rows = _rows(table, "_key", "_valid_from_offset", "_valid_to_offset", *ORDER.names).to_pydict()
    return zip(rows["_key"], values_of(rows), rows["_valid_from_offset"], rows["_valid_to_offset"], strict=True)


def _changes(table: pa.Table) -> Iterator[Change]:
    columns = (table[name].to_pylist() for name in ("op", "key", "value"))
    for op, key, value in zip(*columns, strict=True):
        yield key, value if op == Op.PUT else None
