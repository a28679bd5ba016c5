"""Rows on their way from workers that decode records to workers that write parts: pieces beside the table's data files.

Where only a decoded value tells the key, each record is decoded once: readers divide their rows by part, and store each
part's rows as a piece; then writers merge the pieces of their part. A piece has the name of a data file that no commit
names: readers of the table do not see it, the driver removes it when the parts are written, and what a crash leaves is
removed with the other files of failed jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import StrandlineError
from strandline.log.read.planning import divided
from strandline.model.cursor import Span
from strandline.tables.files.part import TablePart, complete_rows
from strandline.tables.work import records_of
from strandline.tables.written import Written


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What a reader has read, and the paths of the pieces that it stored, by part."""

    read: Written
    paths: Mapping[int, str]


def exchanged(
    parts: Sequence[TablePart],
    spans: Sequence[Span],
    most: int | None,
    run: Callable[[Sequence[Callable[[], Any]]], list[Any]],
) -> list[Written]:
    """Write parts by keys, of which each worker decodes only its share of the spans; the reports of all workers.

    ``run`` gives the results of picklable tasks, in their order: there are two rounds of them. ``most`` is as for
    :func:`~strandline.tables.work.records_of`.
    """
    one, count = parts[0], len(parts)
    groups = [list(group) for group in divided(spans, count) if group]
    found: list[_Pieces] = run([partial(_divided, one, count, group, most) for group in groups])
    pieces = [[each.paths[number] for each in found if number in each.paths] for number in range(count)]
    try:
        written = run([partial(_merged, part, number, pieces[number]) for number, part in enumerate(parts)])
    finally:
        for path in chain.from_iterable(pieces):
            with contextlib.suppress(StrandlineError):  # it is removed later, with the files of failed jobs
                one.files.remove(path)
    return [*[each.read for each in found], *written]


def _divided(part: TablePart, parts: int, spans: Sequence[Span], most: int | None) -> _Pieces:
    """Decode the records of some spans, and store their rows as a piece for each of the parts that has some."""
    reader = part.reader()
    found: dict[int, list[pa.Table]] = {}
    for rows in complete_rows(reader, records_of(spans, most), spans):
        for number, own in _by_part(part, parts, rows):
            found.setdefault(number, []).append(own)
    paths = {number: _stored(part, found.pop(number)) for number in list(found)}
    return _Pieces(reader.passed_on(), paths)


def _merged(part: TablePart, number: int, paths: Sequence[str]) -> Written:
    return part.write_rows(map(part.files.read, paths), number=number)


def _by_part(part: TablePart, parts: int, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    import numpy as np

    numbers = part.numbers(rows, parts)
    for number in np.unique(numbers).tolist():
        yield int(number), rows.filter(pa.array(numbers == number))


def _stored(part: TablePart, rows: list[pa.Table]) -> str:
    out = pa.BufferOutputStream()
    # Read once, and at once: whatever makes files small or lets readers skip rows would cost more than it saves.
    whole = pa.concat_tables(rows)
    pq.write_table(whole, out, compression="lz4", use_dictionary=False, write_statistics=False)
    return part.files.put(part.new_name(), memoryview(out.getvalue()))
