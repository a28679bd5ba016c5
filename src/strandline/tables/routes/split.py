"""Divides records by a route: each table's own, in the order of their offsets, and those of none. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from strandline.model.addresses import is_plain_name
from strandline.tables.rows.conditions import Label, RowCondition, Taken
from strandline.tables.rows.kinds import kept_rows, taken_rows

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Divided:
    """The records of a range, by table; a record may be several tables'."""

    taken: Mapping[str, pa.Table]
    """Those of each table that has some."""
    is_taken: np.ndarray
    """Which of all records some table takes."""


class Splitter(Protocol):
    """Divides records by table. Picklable for workers."""

    def divide(self, records: pa.Table) -> Divided:
        """The records by table."""


@dataclass(frozen=True, slots=True)
class ByConditions:
    """Divides records by the condition of each table; a table without one takes all of them."""

    conditions: Mapping[str, Taken | None]

    def divide(self, records: pa.Table) -> Divided:
        """The records by table. Each label is computed once for all conditions on it."""
        import numpy as np

        taken: dict[str, pa.Table] = {}
        is_taken = np.zeros(records.num_rows, bool)
        by_label: dict[Label, dict[str, list[str]]] = {}
        for name, one in self.conditions.items():
            if isinstance(one, RowCondition) and one.label is not None:
                by_label.setdefault(one.label, {}).setdefault(one.equals, []).append(name)
            elif one is None:
                is_taken[:] = True
                taken[name] = records
            else:
                mask = one.mask(records)
                is_taken |= mask.to_numpy().astype(bool)
                taken[name] = kept_rows(records, mask)
        for label, names in by_label.items():
            for value, places, own in grouped(records, label.of(records)):
                if value in names:
                    is_taken[places] = True
                    taken |= dict.fromkeys(names[value], own())
        return Divided({name: rows for name, rows in taken.items() if rows.num_rows}, is_taken)


@dataclass(frozen=True, slots=True)
class ByLabel:
    """Divides records by a label, which names their table; a label that is no plain name is no table's."""

    label: Label
    without: frozenset[str] = frozenset()
    """Names that have no table."""
    known: frozenset[str] | None = None
    """If given, no other name has a table."""

    def divide(self, records: pa.Table) -> Divided:
        """The records by table."""
        import numpy as np

        is_taken = np.zeros(records.num_rows, bool)
        taken: dict[str, pa.Table] = {}
        for value, places, own in grouped(records, self.label.of(records)):
            if self._has_table(value):
                is_taken[places] = True
                taken[value] = own()
        return Divided(taken, is_taken)

    def _has_table(self, name: str) -> bool:
        is_known = self.known is None or name in self.known
        return is_known and name not in self.without and is_plain_name(name)


def grouped(records: pa.Table, labels: pa.ChunkedArray) -> Iterator[tuple[str, np.ndarray, Callable[[], pa.Table]]]:
    """Each label with the places of its records, and what gives these, in the order of their offsets."""
    import numpy as np

    coded = pa.concat_arrays(labels.chunks or [pa.nulls(0, pa.string())]).dictionary_encode()
    values = coded.dictionary.to_pylist()
    if len(values) == 1 and not labels.null_count:
        yield values[0], np.arange(records.num_rows), lambda: records
        return
    codes = coded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(values)), side="right")
    ordered: list[pa.Table] = []

    def own(start: int, end: int) -> pa.Table:
        if not ordered:  # the records of all labels at once
            ordered.append(taken_rows(records, pa.array(order)))
        return ordered[0].slice(start, end - start)

    start = 0
    for value, end in zip(values, ends.tolist(), strict=True):
        yield value, order[start:end], lambda start=start, end=end: own(start, end)  # type: ignore[misc]
        start = end
