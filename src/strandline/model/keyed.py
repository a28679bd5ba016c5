"""Keyed values: entries of a key-value store, updates, and scopes of watchers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, starmap
from typing import Any, Final, NamedTuple, TypeAlias, final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput
from strandline.model.arguments import Prose, Signed
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA, TIMESTAMP, Op, no_headers

KeyVersion: TypeAlias = Signed
"""An opaque token: the higher of two versions in one stream is the newer. It has no other meaning."""

Key: TypeAlias = bytes | Prose
"""A key or prefix as callers give it; text is encoded as UTF-8."""


class KeyValueEntry(NamedTuple):
    """A present key; its value may be empty. The version is None if the backend does not know it."""

    key: bytes
    value: bytes
    version: KeyVersion | None


class Update(NamedTuple):
    """One change of one key. ``value`` is None for a delete or purge. An unknown version is None."""

    op: Op
    key: bytes
    value: bytes | None
    version: KeyVersion | None


def as_key(key: Key) -> bytes:
    """The bytes of a key or prefix; ``InvalidInput`` unless it is bytes or text."""
    if not isinstance(key, str):
        return as_bytes(key)
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"The key {key!r} cannot be encoded as UTF-8: give its bytes instead.") from error


def as_bytes(value: bytes | bytearray | memoryview | None) -> bytes:
    """A key or value as bytes; ``InvalidInput`` for anything that is not bytes, such as text."""
    if type(value) is bytes:
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"Keys and values are bytes, not {type(value).__name__}: encode it first.")
    return bytes(value)


@final
class Prefix:
    """The keys that begin with any of these bytes; overlapping prefixes count once. Hashable and picklable.

    >>> scope = Prefix("node.", b"route.", "node.7")
    >>> scope.prefixes
    (b'node.', b'route.')
    >>> b"node.1" in scope, b"other" in scope
    (True, False)
    """

    __slots__ = ("prefixes",)

    def __init__(self, *prefixes: Key) -> None:
        if not prefixes:
            raise InvalidInput("A scope needs at least one prefix; EVERYTHING is the empty one.")
        wanted = sorted({as_key(prefix) for prefix in prefixes})
        kept: list[bytes] = []
        for prefix in wanted:
            if not kept or not prefix.startswith(kept[-1]):
                kept.append(prefix)
        self.prefixes: Final[tuple[bytes, ...]] = tuple(kept)

    def __contains__(self, key: bytes) -> bool:
        return key.startswith(self.prefixes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and self.prefixes == other.prefixes

    def __hash__(self) -> int:
        return hash(self.prefixes)

    def __repr__(self) -> str:
        return f"Prefix({', '.join(map(repr, self.prefixes))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Prefix, self.prefixes)

    @property
    def everything(self) -> bool:
        """Whether it contains every key."""
        return self.prefixes == (b"",)

    def mask(self, keys: pa.Array | pa.ChunkedArray) -> Any:
        """Which of an Arrow column's keys are in scope; null keys are not."""
        masks = [pc.starts_with(keys, prefix) for prefix in self.prefixes]
        total = masks[0]
        for mask in masks[1:]:
            total = pc.or_(total, mask)
        return pc.fill_null(total, False)


Scope: TypeAlias = Prefix
EVERYTHING: Final = Prefix(b"")

UNKNOWN: Final = -1
"""Represents None in a column of versions."""

_TO_OP: Final = tuple(Op)
_OP: Final = pa.int8()
_BYTES: Final = pa.binary()


@final
class Updates(Sequence[Update]):
    """Changes in stream order, as columns, and the cursor after them; immutable.

    ``upto`` is None for changes without a stream position, such as the deletes of a resync. It may be past the last
    version: changes out of scope are skipped. Rows are created on access.
    """

    __slots__ = ("_columns", "_table", "upto")

    def __init__(
        self,
        ops: Sequence[int],
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        versions: Sequence[int],
        upto: Cursor | None,
    ) -> None:
        self._columns: tuple[Sequence[Any], ...] | None = (ops, keys, values, versions)
        self._table: pa.Table | None = None
        self.upto = upto

    @classmethod
    def of(cls, rows: Iterable[Update], since: Cursor) -> Updates:
        """From rows; the cursor moves past the highest known version, or stays at ``since``.

        >>> from uuid import UUID
        >>> at = Cursor(UUID(int=1), 5)
        >>> Updates.of([Update(Op.PUT, b"a", b"1", None)], at).upto == at
        True
        """
        rows = list(rows)
        versions = [UNKNOWN if row.version is None else row.version for row in rows]
        upto = since.at(max(since.next, max(versions, default=UNKNOWN) + 1))
        return cls([row.op for row in rows], [row.key for row in rows], [row.value for row in rows], versions, upto)

    @classmethod
    def of_table(cls, table: pa.Table, upto: Cursor) -> Updates:
        """From records with offsets; converted to Python objects on access."""
        made = cls((), (), (), (), upto)
        made._columns, made._table = None, table
        return made

    @classmethod
    def removals(cls, keys: Sequence[bytes]) -> Updates:
        """Deletes of these keys, without a cursor."""
        count = len(keys)
        return cls([Op.DELETE] * count, keys, [None] * count, [UNKNOWN] * count, None)

    @classmethod
    def joined(cls, parts: Sequence[Updates]) -> Updates:
        """The concatenation; its cursor is the last known one."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls((), (), (), (), None)
        upto = next((part.upto for part in reversed(parts) if part.upto is not None), None)
        if upto is not None and all(part.columnar for part in parts):
            return cls.of_table(pa.concat_tables([part.table() for part in parts]), upto)
        columns = zip(*(part.columns for part in parts), strict=True)
        ops, keys, values, versions = (list(chain.from_iterable(column)) for column in columns)
        return cls(ops, keys, values, versions, upto)

    def split(self, count: int) -> tuple[Updates, Updates | None]:
        """The first ``count`` changes, and the rest or None; the first part ends where the rest begins.

        The rest begins with a known version, so the first part may be longer.
        """
        if self.upto is None:
            raise InvalidInput("Only changes of a stream can be split: the cursor between the parts must be known.")
        if len(self) <= count:
            return self, None
        if self._columns is None and self._table is not None:
            at = self.upto.at(self._table.column("offset")[count].as_py())
            return Updates.of_table(self._table[:count], at), Updates.of_table(self._table[count:], self.upto)
        ops, keys, values, versions = self.columns
        while count < len(versions) and versions[count] == UNKNOWN:
            count += 1
        if count == len(versions):
            return self, None
        head = Updates(ops[:count], keys[:count], values[:count], versions[:count], self.upto.at(versions[count]))
        return head, Updates(ops[count:], keys[count:], values[count:], versions[count:], self.upto)

    @property
    def columnar(self) -> bool:
        """Whether it is still an Arrow table."""
        return self._columns is None

    @property
    def columns(self) -> tuple[Sequence[Any], ...]:
        """Operations, keys, values and versions, the unknown ones as :data:`UNKNOWN`."""
        if self._columns is None:
            table = self.table()  # one of the two forms always exists
            self._columns = tuple(table.column(name).to_pylist() for name in ("op", "key", "value", "offset"))
        return self._columns

    @property
    def keys(self) -> Sequence[bytes]:
        """The key of each change."""
        keys: Sequence[bytes] = self.columns[1]
        return keys

    @property
    def size(self) -> int:
        """Approximate bytes of the values."""
        if self._columns is None and self._table is not None:
            return int(self._table.column("value").nbytes)
        return sum(map(len, filter(None, self.columns[2])))

    def table(self) -> pa.Table:
        """The changes as records with offsets (:data:`~strandline.model.records.READ_SCHEMA`), for a sink.

        Timestamps are the epoch. An unknown version gets the offset of the next known one, or the last offset: offsets
        never decrease, and changes below a cursor come before the others.
        """
        if self._table is None:
            offsets = self._offsets(self.columns[3])
            self._table = pa.Table.from_arrays([offsets, *self.batch().columns], schema=READ_SCHEMA)
        return self._table

    def batch(self) -> pa.RecordBatch:
        """The changes as records without offsets (:data:`~strandline.model.records.RECORD_SCHEMA`), for storage."""
        ops, keys, values, _ = self.columns
        count = len(keys)
        timestamps, headers = _blanks(count)
        plain = pa.Array.from_buffers(_OP, count, [None, pa.py_buffer(bytes(ops))])
        columns = [timestamps, plain, pa.array(keys, _BYTES), pa.array(values, _BYTES), headers]
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def _offsets(self, versions: Sequence[int]) -> pa.Array:
        if isinstance(versions, range) and versions.step == 1:
            return pa.arange(versions.start, versions.stop)
        if UNKNOWN in versions:
            versions = _filled(versions, max(0, (self.upto.next if self.upto is not None else 0) - 1))
        return pa.array(versions, pa.int64())

    def __len__(self) -> int:
        return self._table.num_rows if self._columns is None and self._table is not None else len(self.columns[1])

    def __iter__(self) -> Iterator[Update]:
        return starmap(_row, zip(*self.columns, strict=True))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [_row(*row) for row in zip(*(column[index] for column in self.columns), strict=True)]
        return _row(*(column[index] for column in self.columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Updates) and self.upto == other.upto and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Updates({list(self)!r}, upto={self.upto})"


def _row(op: int, key: bytes, value: bytes | None, version: int) -> Update:
    return Update(_TO_OP[op], key, value, None if version == UNKNOWN else version)


@lru_cache(maxsize=8)
def _blanks(count: int) -> tuple[pa.Array, pa.Array]:
    """Epoch timestamps and empty headers; cached, since most batches have one size."""
    return pa.Array.from_buffers(TIMESTAMP, count, [None, pa.py_buffer(bytes(8 * count))]), no_headers(count)


def _filled(versions: Sequence[int], last: int) -> list[int]:
    """Replace each unknown version by the next known one, or by ``last``."""
    offsets = list(versions)
    following = last
    for index in range(len(offsets) - 1, -1, -1):
        if offsets[index] == UNKNOWN:
            offsets[index] = following
        following = offsets[index]
    return offsets
