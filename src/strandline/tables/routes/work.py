"""The task of a worker that writes several tables of a route: one fetch and one division of records for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import StrandlineError
from strandline.model.cursor import Span
from strandline.tables.files.layout import FEW_SHARES
from strandline.tables.files.part import PartReader, TablePart, as_tables
from strandline.tables.routes.route import UNROUTED
from strandline.tables.routes.split import Splitter
from strandline.tables.work import records_of
from strandline.tables.written import Written


@dataclass(frozen=True, slots=True)
class RoutedReport:
    """What a worker wrote, and found, of its share of a range."""

    written: Mapping[tuple[str, int], Written]
    """By table and part."""
    names: frozenset[str]
    """Tables that have records among its own."""
    rest: int
    """Its own records that no table takes."""
    example: str = ""
    """One of them."""
    failed: Mapping[str, StrandlineError] = field(default_factory=dict)
    """Tables whose rows could not be written."""


@dataclass(frozen=True, slots=True)
class RoutedTask:
    """One worker's share of a range of all tables. Picklable.

    ``keyed`` parts take their keys of all records of the range, ``plain`` ones all records of the worker's ``own``
    spans. A worker without keyed parts reads only its own spans.
    """

    splitter: Splitter
    plain: Mapping[tuple[str, int], TablePart]
    keyed: Mapping[tuple[str, int], TablePart]
    spans: tuple[Span, ...]
    first: int
    next: int
    most: int | None = None

    def __call__(self) -> RoutedReport:
        """Read once, and write all parts."""
        readers = {at: _Routed(part) for at, part in {**self.plain, **self.keyed}.items()}
        names: set[str] = set()
        failed: dict[str, StrandlineError] = {}
        rest, example = 0, ""
        for records, is_own in self._pieces():
            divided = self.splitter.divide(records)
            taken = dict(divided.taken)
            missing = records.filter(pa.array(~divided.is_taken)) if not divided.is_taken.all() else None
            if missing is not None:
                taken[UNROUTED] = missing
            if is_own:
                names |= divided.taken.keys()
                if missing is not None:
                    rest += missing.num_rows
                    example = example or described(missing)
            for (name, number), reader in readers.items():
                if name not in failed and (is_own or (name, number) in self.keyed):
                    with _failing_alone(name, failed):
                        reader.read(records, taken.get(name))
        written: dict[tuple[str, int], Written] = {}
        for (name, number), reader in readers.items():
            if name not in failed:
                with _failing_alone(name, failed):
                    written[name, number] = reader.written()
        return RoutedReport(written, frozenset(names), rest, example, failed)

    def _pieces(self) -> Iterator[tuple[pa.Table, bool]]:
        """The records, and whether they are the worker's own."""
        for records in as_tables(records_of(self.spans, self.most)):
            low, high = (pc.sum(pc.less(records.column("offset"), end)).as_py() or 0 for end in (self.first, self.next))
            pieces = (records.slice(0, low), records.slice(low, high - low), records.slice(high))
            yield from ((one, number == 1) for number, one in enumerate(pieces) if one.num_rows)


@contextlib.contextmanager
def _failing_alone(name: str, failed: dict[str, StrandlineError]) -> Iterator[None]:
    """An error of a table, such as a record without a row, is that of this table alone."""
    try:
        yield
    except StrandlineError as error:
        failed[name] = error


@dataclass(slots=True)
class _Routed:
    """One part of a table, which is given its records among those of the whole range."""

    part: TablePart
    reader: PartReader = field(init=False)
    _rows: list[pa.Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.part = replace(self.part, shape=self.part.shape.without_condition())
        self.reader = PartReader(self.part)

    def read(self, records: pa.Table, own: pa.Table | None) -> None:
        rows = self.reader.routed(records, own)
        if rows is not None and rows.num_rows:
            self._rows.append(rows)

    def written(self) -> Written:
        return self.part.stored(self.reader, self._rows)


def divided_parts(
    parts: Mapping[str, Sequence[TablePart]], groups: Sequence[Sequence[Span]], splitter: Splitter, most: int | None
) -> list[RoutedTask]:
    """The tasks of workers: one for each group of spans, with its parts of tables of changes, and some keyed parts.

    Keyed parts go to a few of the workers: each of these reads the whole range.
    """
    every = tuple(span for group in groups for span in group)
    readers = min(len(groups), FEW_SHARES)
    keyed: list[dict[tuple[str, int], TablePart]] = [{} for _ in groups]
    plain: list[dict[tuple[str, int], TablePart]] = [{} for _ in groups]
    dealt = 0
    for name, some in parts.items():
        for number, part in enumerate(some):
            if part.takes == "keys":
                keyed[dealt % readers][name, number] = part
                dealt += 1
            else:
                plain[number][name, number] = part
    tasks = []
    for number, group in enumerate(groups):
        spans = every if keyed[number] else tuple(group)
        tasks.append(RoutedTask(splitter, plain[number], keyed[number], spans, group[0].first, group[-1].next, most))
    return tasks


def described(records: pa.Table) -> str:
    """One of some records, for a message."""
    key, offset = records.column("key")[0].as_py(), records.column("offset")[0].as_py()
    value = ", without a value" if records.column("value")[0].as_py() is None else ""
    return f"offset {offset}, {'without a key' if key is None else f'key {key[:80]!r}'}{value}"
