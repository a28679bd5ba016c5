"""A proposed schema of a log's values, or of the files that are to be loaded, from a bounded sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Final

import pyarrow as pa

from strandline.bulk.load_files import FilePart, RecordFields, are_records
from strandline.bulk.load_sources import LoadedFile, files_at
from strandline.errors import InvalidInput, NotALog, NotFound, Unsupported
from strandline.log.addressed import log_at
from strandline.log.contract import READING, LogReading, require
from strandline.log.read.value_format import named_codec
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import Positive, checked
from strandline.values.proposal import SchemaProposal, propose
from strandline.values.schema.json_schema_text import json_schema_of

_PLACES: Final = 9
"""Parts of a log, or of a large file, that are looked at: the beginning, the middle, the end, and between those."""
_WINDOW: Final = 4 << 20
"""Bytes that are read at each place of a large file of JSON lines."""
_MOST_BYTES: Final = 64 << 20
"""Limit on the values that are held."""
_NO_FIELDS: Final = RecordFields()


@checked
def infer(source: LogReading | Address, *, records: Positive = 10_000) -> SchemaProposal:
    """Propose a schema for the values of a log, or of files that are to be loaded; nothing is changed.

    ``source`` is a log or its address, or the address of a file or folder as :func:`load` takes it: JSON lines of
    values or of records, CSV, Parquet, Arrow. Up to ``records`` values are looked at, from the beginning, the end and
    places in between, so that fields are seen that came later. Files of columns have a schema, which is proposed as it
    is.

    All values of the sample decode with the proposal, but for those that its notes count. What was ambiguous is in the
    notes, too. ``InvalidInput`` if no value is a JSON object, or the log names the format of its values already;
    ``NotFound`` if there is neither a log nor a file.

    >>> import strandline as sl
    >>> log = sl.open("memory://doctest-infer", create=True)
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"1", value=b'{"id": 1, "city": "Oslo", "at": 1767225600000}').result()
    >>> found = sl.bulk.infer(log)
    >>> sl.values.Json(found.text).schema.names
    ['id', 'city', 'at']
    >>> print(*found.notes)
    The field 'at' may be a time in milliseconds since 1970 (2026-01-01 to 2026-01-01), or a number: it stays one.
    """
    try:
        with log_at(source) as log:
            return _of_log(log, records)
    except NotALog as no_log:
        if not isinstance(source, str | PathLike):
            raise
        try:
            files = files_at([source], None)
        except NotFound:
            raise NotFound(f"There is neither a log nor a file at {as_address(source)}: check the address.") from no_log
        return _of_files(files, records)


def _of_log(log: LogReading, records: int) -> SchemaProposal:
    require(log, "looked at", *READING)
    try:
        named = named_codec(log)
    except Unsupported:
        named = None
    if named is not None:
        raise InvalidInput(
            f"The log names the format of its values already, {named!r:.200}: there is nothing to infer."
        )
    bounds = log.bounds()
    values = _thinned(_log_values(log, sampled_ranges(bounds.first, bounds.next, records)), records)
    return propose(values, f"{len(values):,} records of the offsets {bounds.first:,} up to {bounds.next:,}")


def _log_values(log: LogReading, ranges: Sequence[tuple[int, int]]) -> Iterator[pa.Array]:
    for first, upto in ranges:
        for batch in log.read(first, upto=upto, columns=["value"]):
            yield batch.column("value")


def sampled_ranges(first: int, end: int, records: int) -> list[tuple[int, int]]:
    """Disjoint ranges of offsets with so many in all, spread evenly, the first and the last ones included.

    >>> sampled_ranges(0, 1000, 45)
    [(0, 5), (124, 129), (248, 253), (373, 378), (497, 502), (621, 626), (746, 751), (870, 875), (995, 1000)]
    >>> sampled_ranges(5, 20, 40), sampled_ranges(5, 5, 40), sampled_ranges(0, 9, 1)
    ([(5, 20)], [], [(0, 1)])
    """
    held = end - first
    if held <= records:
        return [(first, end)] if held else []
    places = min(_PLACES, records)
    each = records // places
    begins = [first + (held - each) * place // max(1, places - 1) for place in range(places)]
    return [(begin, begin + each) for begin in begins]


# --- files --------------------------------------------------------------------------------------------------------


def _of_files(files: Sequence[LoadedFile], records: int) -> SchemaProposal:
    where = files[0].where if len(files) == 1 else f"{len(files):,} files, {files[0].where} to {files[-1].where}"
    schemas = [schema for file in files if (schema := _columns(file)) is not None]
    if schemas:
        if len(schemas) < len(files) or any(not schema.equals(schemas[0]) for schema in schemas):
            raise InvalidInput(f"The files have different columns ({where}): name one of them.")
        document = {"description": f"The columns of {where}.", **json_schema_of(schemas[0])}
        return SchemaProposal(document, (), 0, 0, where)
    looked_at = _spread(files)
    each = -(-records // len(looked_at))
    values = _thinned((pa.array(_sample(file, each), pa.binary()) for file in looked_at), records)
    return propose(values, f"{len(values):,} records of {where}")


def _spread(files: Sequence[LoadedFile]) -> list[LoadedFile]:
    """Some of many files, the first and the last ones included."""
    if len(files) <= _PLACES:
        return list(files)
    return [files[(len(files) - 1) * place // (_PLACES - 1)] for place in range(_PLACES)]


def _columns(file: LoadedFile) -> pa.Schema | None:
    """The columns of the rows in a file of columns; None if it holds values: text, or exported records."""
    if file.format not in ("parquet", "arrow"):
        return None
    schema = FilePart(file).schema()
    return None if are_records(schema.names) else schema


def _sample(file: LoadedFile, most: int) -> list[bytes | None]:
    """Up to ``most`` values of a file, from all of it; of large JSON lines from windows."""
    windows: list[range | None] = [None]
    if file.format == "jsonl" and file.compression is None and file.size > _PLACES * _WINDOW:
        begins = [(file.size - _WINDOW) * place // (_PLACES - 1) for place in range(_PLACES)]
        windows = [range(begin, begin + _WINDOW) for begin in begins]
    parts = (FilePart(file, window=window).records(_NO_FIELDS, None) for window in windows)
    each = -(-most // len(windows))
    return [value for part in parts for value in _thinned((batch.column("value") for batch in part), each)]


def _thinned(columns: Iterable[pa.Array], most: int) -> list[bytes | None]:
    """Up to ``most`` values at even distances, though it is not known before how many there are, nor how large."""
    kept: list[bytes | None] = []
    step, seen, size = 1, 0, 0
    for column in columns:
        some = column.take(pa.array(range(-seen % step, len(column), step), pa.int64())).to_pylist()
        seen += len(column)
        kept += some
        size += sum(len(value) for value in some if value is not None)
        while len(kept) > 2 * most or (size > _MOST_BYTES and len(kept) > 1):
            kept, step = kept[::2], 2 * step
            size = sum(len(value) for value in kept if value is not None)
    return kept if len(kept) <= most else [kept[len(kept) * at // most] for at in range(most)]
