"""What must come out, computed without the log: plain dicts over the generator, and plain looks at what was stored."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strandline.cli.demo.generator import Change, Shape, changes, producer_of


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
        digest = hashlib.sha256()
        for key, value in changes(shape, producer):
            _feed(digest, key, value)
            if value is None:
                latest.pop(key, None)
            else:
                latest[key] = value
        digests.append(digest.hexdigest())
    return Truth(shape.records, latest, tuple(digests))


def _feed(digest: hashlib._Hash, key: bytes, value: bytes | None) -> None:
    digest.update(b"%d:%s" % (len(key), key))
    digest.update(b"-" if value is None else b"%d:%s" % (len(value), value))


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A table of the latest values against the truth, in keys; ``doubled`` are rows of a key beyond its first."""

    rows: int
    missing: int
    extra: int
    different: int
    doubled: int

    @property
    def exact(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.missing or self.extra or self.different or self.doubled)


def compare_state(keys: Sequence[bytes], values: Sequence[bytes], expected: Truth) -> StateDifference:
    """Rows of a table of the latest values against the truth.

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
    """A table of all changes against the truth, by offset; ``disordered`` are producers whose changes differ."""

    rows: int
    lost: int
    doubled: int
    disordered: int

    @property
    def exact(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.doubled or self.disordered)


def compare_history(offsets: Iterable[int], stored: Iterable[Change], expected: Truth) -> HistoryDifference:
    """Rows of a table of all changes, ordered by offset, against the truth: each offset once, each change in order."""
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
    """The latest value of each key, from changes in order: what a view over a table of changes would show."""
    latest: dict[bytes, bytes] = {}
    for key, value in stored:
        if value is None:
            latest.pop(key, None)
        else:
            latest[key] = value
    return latest
