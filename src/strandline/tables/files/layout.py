"""Layout of keyed tables: each file covers a range of key hashes, by halves, quarters and so on. No I/O.

A file of a keyed table covers one range; a file that grows is split in two halves when it is written again. So the
number of files follows the size of the table, nothing has to be chosen when it is created, and workers with disjoint
ranges never touch the same key. A file without a range in its name, as OPTIMIZE or an earlier release writes it, covers
all hashes: that is always right, and it is divided when it is written again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from strandline.tables.rows.hashing import HASH_BITS, key_hashes

if TYPE_CHECKING:
    import numpy as np

_NAME: Final = re.compile(
    r"(?:^|/)(?P<role>keys|closed)-(?P<depth>\d\d)-(?P<prefix>[0-9a-f]{8})-[0-9a-f-]{68,}\.parquet$"
)
_APPENDED: Final = re.compile(r"part-[0-9a-f-]{68,}\.parquet")
_JOB: Final = re.compile(r"-([0-9a-f]{16})-([0-9a-f-]{36})-[0-9a-f-]{36}\.parquet$")
FEW_SHARES: Final = 8
"""Workers of a small keyed table. Each may fetch all records and keep its own keys; more of them would fetch more than
they merge."""
SHARE_BYTES: Final = 32 << 20
"""Bytes of a larger table for which there may be one more worker: fewer would leave files that are too small."""
MAX_DEPTH: Final = 16
"""Files are split no further: 65,536 ranges."""


@dataclass(frozen=True, slots=True, order=True)
class HashRange:
    """The hashes whose first ``depth`` bits are ``prefix``.

    >>> HashRange(1, 1).low == 1 << 31
    True
    >>> HashRange(1, 1).contains(HashRange(3, 5)), HashRange(3, 5).overlaps(HashRange(1, 0))
    (True, False)
    """

    depth: int = 0
    prefix: int = 0

    @property
    def low(self) -> int:
        """The lowest hash."""
        return self.prefix << (HASH_BITS - self.depth)

    @property
    def high(self) -> int:
        """The hash after the highest."""
        return (self.prefix + 1) << (HASH_BITS - self.depth)

    def contains(self, other: HashRange) -> bool:
        """Whether all hashes of another range are in this one."""
        return self.low <= other.low and other.high <= self.high

    def overlaps(self, other: HashRange) -> bool:
        """Whether a hash is in both."""
        return self.low < other.high and other.low < self.high

    def halves(self) -> tuple[HashRange, HashRange]:
        """The two ranges that one more bit gives."""
        return HashRange(self.depth + 1, 2 * self.prefix), HashRange(self.depth + 1, 2 * self.prefix + 1)

    def mask(self, hashes: np.ndarray) -> np.ndarray:
        """Which of the hashes are in the range."""
        import numpy as np

        if not self.depth:
            return np.ones(len(hashes), bool)
        result: np.ndarray = (hashes >> np.uint32(HASH_BITS - self.depth)) == self.prefix
        return result

    def rows_of(self, rows: pa.Table, key: str) -> pa.Table:
        """The rows whose keys have a hash in the range."""
        return rows.filter(pa.array(self.mask(key_hashes(rows.column(key))))) if self.depth else rows


WHOLE: Final = HashRange()
"""All hashes."""


def file_name(role: str, covered: HashRange, unique: str) -> str:
    """The name of a data file; ``role`` is ``keys``, or ``closed`` for versions that never change again.

    >>> range_of(file_name("keys", HashRange(3, 5), "7c1d" * 17)) == HashRange(3, 5)
    True
    """
    return f"{role}-{covered.depth:02d}-{covered.prefix:08x}-{unique}.parquet"


def job_name(version: int, unique: str) -> str:
    """The name of a job that commits as a version of a table: part of the names of its files.

    >>> version_in(file_name("keys", WHOLE, f"{job_name(7, 'c' * 36)}-{'d' * 36}"))
    7
    """
    return f"{version:016x}-{unique}"


def version_in(path: str) -> int | None:
    """The version as which a file was to be committed, by its name; None for any other file."""
    found = _JOB.search(path)
    return None if found is None or not is_data_file(path.rpartition("/")[2]) else int(found[1], 16)


def job_in(table: str, job: str) -> str:
    """The name of a job once its table has an id: a job that creates the table is named before.

    >>> job_in("c" * 36, job_name(1, "d" * 36)) == job_name(1, "c" * 36)
    True
    """
    return f"{job.partition('-')[0]}-{table}"


def is_for_later(path: str, job: str) -> bool:
    """Whether a file was written for a later commit to the table of a job than that job's, by their names.

    >>> [is_for_later(f"part-{job_name(7, 'c' * 36)}-{'d' * 36}.parquet", job_name(at, "c" * 36)) for at in (6, 7)]
    [True, False]
    """
    found = _JOB.search(path)
    version, _, table = job.partition("-")
    return found is not None and found[2] == table and found[1] > version


def range_of(path: str) -> HashRange:
    """The range of a file by its name; everything for a name of another writer."""
    found = _NAME.search(path)
    if found is None:
        return WHOLE
    depth, prefix = int(found["depth"]), int(found["prefix"], 16)
    return HashRange(depth, prefix) if depth <= MAX_DEPTH and prefix < 1 << depth else WHOLE


def is_closed(path: str) -> bool:
    """Whether a file holds only versions that never change again, by its name."""
    found = _NAME.search(path)
    return found is not None and found["role"] == "closed"


def shares(tasks: int) -> list[HashRange]:
    """Ranges for ``tasks`` workers or a few more: their number is a power of two, so that files fit into them.

    >>> [(share.depth, share.prefix) for share in shares(3)]
    [(2, 0), (2, 1), (2, 2), (2, 3)]
    """
    depth = max(0, min(tasks - 1, (1 << MAX_DEPTH) - 1).bit_length())
    return [HashRange(depth, prefix) for prefix in range(1 << depth)]


def shares_of(tasks: int, size: int) -> list[HashRange]:
    """Ranges for about ``tasks`` workers of a table with so many bytes; for fewer if it is small.

    >>> len(shares_of(200, 0)), len(shares_of(200, 1 << 40)), len(shares_of(2, 0))
    (8, 256, 2)
    """
    return shares(min(tasks, max(FEW_SHARES, size // SHARE_BYTES)))


def groups(old: Iterable[str], share: HashRange) -> Iterator[tuple[HashRange, list[str]]]:
    """Disjoint ranges that together are the share, each with its files: a range is as wide as its widest file."""
    groups: dict[HashRange, list[str]] = {}
    for file in sorted(old, key=lambda path: range_of(path).depth):
        covered = range_of(file)
        covered = share if covered.contains(share) else covered
        home = next((group for group in groups if group.contains(covered)), covered)
        groups.setdefault(home, []).append(file)
    for gap in _gaps(sorted(groups, key=lambda group: group.low), share):
        groups[gap] = []
    yield from sorted(groups.items())


def _gaps(covered: list[HashRange], share: HashRange) -> Iterator[HashRange]:
    """The widest ranges of the share that overlap none of the covered ones."""
    if not any(one.overlaps(share) for one in covered):
        yield share
        return
    if any(one.contains(share) for one in covered):
        return
    for half in share.halves():
        yield from _gaps(covered, half)


def covering(paths: Iterable[str]) -> HashRange:
    """The narrowest range with the keys of some files.

    >>> covering([file_name("closed", HashRange(3, 5), "7c1d" * 17), file_name("closed", HashRange(2, 3), "8e" * 34)])
    HashRange(depth=1, prefix=1)
    """
    found = [range_of(path) for path in paths]
    widest = min(found, default=WHOLE)
    while not all(widest.contains(one) for one in found):
        widest = HashRange(widest.depth - 1, widest.prefix >> 1)
    return widest


def is_data_file(name: str) -> bool:
    """Whether a file was written by a worker, by its name."""
    return bool(_NAME.fullmatch(name) or _APPENDED.fullmatch(name))
