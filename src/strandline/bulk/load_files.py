"""Files of other programs as records of a log: JSON lines, CSV, Parquet and Arrow, read piece by piece."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from strandline.bulk.load_sources import LoadedFile
from strandline.bulk.load_times import as_time, with_short_times
from strandline.errors import InvalidInput, SchemaRefused, Unsupported
from strandline.formats.json.records import is_record, parse_record, record_table
from strandline.log.read.value_format import named_codec
from strandline.model.records import RECORD_SCHEMA, Op, conform
from strandline.storage.clock import CLOCK
from strandline.values.codecs.structs import Json
from strandline.values.contract import Codec

_READ_AT_ONCE: Final = 8 << 20
_LINES_AT_ONCE: Final = 2 << 20
"""Bytes of lines that are decoded at once."""
_ROWS: Final = 1 << 16
_CSV_BLOCK: Final = 16 << 20
"""Bytes of CSV that are parsed at once: a row is no longer than that."""
_OPS: Final = pa.array([op.name.lower() for op in Op])
_ARROW_FILE: Final = b"ARROW1"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Some programs write it at the beginning of text in UTF-8."""
_ABSENT: Final = msgspec.Raw(b"")
_FIRST_PRINTABLE: Final = 0x20


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Names of the fields or columns that become the parts of a record; None for a part that the files do not have."""

    key: str | None = None
    op: str | None = None
    timestamp: str | None = None
    value: str | None = None
    headers: tuple[str, ...] = ()
    """Each becomes a header with its name; one without a value becomes none."""
    truncates_times: bool = False
    """Whether times that are finer than a microsecond are cut; otherwise they are refused."""

    @property
    def named(self) -> list[str]:
        """All of them, once each."""
        given = (self.key, self.op, self.timestamp, self.value, *self.headers)
        return list(dict.fromkeys(name for name in given if name is not None))


def codec_for(log: Any) -> Codec | None:
    """The codec of the values of rows that are loaded into a log; None if it names no format, or has none."""
    try:
        found = named_codec(log)
    except Unsupported:
        return None
    return None if found is None or found.name == "raw" else found


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or some row groups of a Parquet file: what one task reads in order."""

    file: LoadedFile
    groups: tuple[int, ...] | None = None
    window: range | None = None
    """Of uncompressed JSON lines: only those that begin within these bytes, and end there."""

    def records(self, fields: RecordFields, codec: Codec | None) -> Iterator[pa.RecordBatch]:
        """The records, in the order of the file; ``InvalidInput`` names the file and the row that is no record."""
        at = 0
        for rows in self._rows(fields, codec):
            if not rows.num_rows:
                continue
            try:
                yield from conform(rows, now=CLOCK.now())
            except InvalidInput as error:
                raise InvalidInput(f"{self.file.where}, from row {at:,} on: {error}") from error
            at += rows.num_rows

    @property
    def _where(self) -> str:
        return self.file.where + (f" (from byte {self.window.start:,} on)" if self.window else "")

    def _rows(self, fields: RecordFields, codec: Codec | None) -> Iterator[pa.Table]:
        file = self.file
        with opened(file) as raw:
            try:
                if file.format == "jsonl":
                    text = raw if self.window is None else _lines_within(raw, self.window)
                    if file.compression is not None:
                        text = io.BufferedReader(_decompressed(raw, file), _READ_AT_ONCE)
                    yield from _from_lines(text, fields, codec, self._where)
                    return
                for rows in self._tables(raw, codec):
                    yield _from_columns(rows, fields, codec, file.where)
            except (pa.ArrowException, EOFError, OSError, UnicodeDecodeError) as error:
                raise InvalidInput(f"{file.where} cannot be read as {file.format}: {error}") from error
            except SchemaRefused as error:
                raise SchemaRefused(f"{file.where} cannot be loaded: {error}") from error

    def _tables(self, raw: io.BufferedReader, codec: Codec | None) -> Iterator[pa.Table]:
        file = self.file
        if file.format == "csv" and not raw.peek(1):
            return  # empty, without a header: a program that had no rows wrote it
        if file.format == "parquet":
            groups = None if self.groups is None else list(self.groups)
            for batch in pq.ParquetFile(pa.PythonFile(raw)).iter_batches(_ROWS, row_groups=groups):
                yield pa.Table.from_batches([batch])
        elif file.format == "csv":
            with opened(file) as head:  # closed by the reader
                names = _csv(_decompressed(head, file)).schema.names
            # Types are never inferred: inference turns 007 into 7, and may differ from file to file.
            typed = {} if codec is None else {field.name: field.type for field in codec.schema}
            kinds = {name: typed.get(name, pa.string()) for name in names}
            convert = pyarrow.csv.ConvertOptions(
                column_types=kinds, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
            )
            for batch in _csv(_decompressed(raw, file), convert):
                yield pa.Table.from_batches([batch])
        else:
            for batch in _arrow_batches(_arrow_reader(raw)):
                batch.validate(full=True)
                yield pa.Table.from_batches([batch])

    def schema(self) -> pa.Schema:
        """The columns of a file of Parquet or Arrow; ``InvalidInput`` if it cannot be read."""
        with opened(self.file) as raw:
            try:
                is_parquet = self.file.format == "parquet"
                found = pq.ParquetFile(pa.PythonFile(raw)).schema_arrow if is_parquet else _arrow_reader(raw).schema
            except (pa.ArrowException, EOFError, OSError) as error:
                raise InvalidInput(f"{self.file.where} cannot be read as {self.file.format}: {error}") from error
        return _without_dictionaries(found)


def _arrow_reader(raw: io.BufferedReader) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    is_file = raw.peek(len(_ARROW_FILE))[: len(_ARROW_FILE)] == _ARROW_FILE
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.PythonFile(raw))


def _arrow_batches(reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _lines_within(raw: io.BufferedReader, window: range) -> io.BufferedReader:
    """The lines that begin within these bytes of a file, and end there."""
    raw.seek(max(0, window.start - 1))  # a line that begins with the window is whole
    if window.start:
        raw.readline(len(window) + 1)
    lines = raw.read(max(0, window.stop - raw.tell()))
    if window.stop < raw.seek(0, io.SEEK_END):
        lines = lines[: lines.rfind(b"\n") + 1]
    return io.BufferedReader(io.BytesIO(lines))


def _csv(stream: Any, convert: pyarrow.csv.ConvertOptions | None = None) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=convert,
    )


def opened(file: LoadedFile) -> io.BufferedReader:
    """A file of a store, to be read from any position."""
    return io.BufferedReader(_StoreFile(file), _READ_AT_ONCE)


class _StoreFile(io.RawIOBase):
    """An object as a file: each read is a request."""

    def __init__(self, file: LoadedFile) -> None:
        super().__init__()
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        count = min(len(into), self._file.size - self._at)
        if count <= 0:
            return 0
        into[:count] = self._file.store.get_range(self._file.path, self._at, count)
        self._at += count
        return count


def _decompressed(raw: io.BufferedReader, file: LoadedFile) -> Any:
    stream = pa.PythonFile(raw)
    return stream if file.compression is None else pa.CompressedInputStream(stream, file.compression)


# --- columns ------------------------------------------------------------------------------------------------------


def _from_columns(rows: pa.Table, fields: RecordFields, codec: Codec | None, where: str) -> pa.Table:
    """The records of rows: of an export as they are, else with the row, or one of its columns, as the value."""
    missing = [name for name in fields.named if name not in rows.column_names]
    if missing:
        raise InvalidInput(f"{where} has no column {missing[0]!r}; it has {', '.join(rows.column_names)}.")
    rows = rows.cast(_without_dictionaries(rows.schema))
    if not fields.named and are_records(rows.column_names):
        return with_short_times(
            rows.select([name for name in rows.column_names if name != "offset"]),
            where,
            truncates=fields.truncates_times,
        )
    value = _encoded(rows, fields, codec) if fields.value is None else _as_bytes(rows.column(fields.value))
    return _named_columns(rows, fields, value, where)


def are_records(names: Sequence[str]) -> bool:
    """Whether columns are those of an export, by their names."""
    return set(names) <= {*RECORD_SCHEMA.names, "offset"} and not {"key", "value"}.isdisjoint(names)


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """The columns with their values' types: pandas writes categories as dictionaries."""
    values = [field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in schema]
    return pa.schema([field.with_type(kind) for field, kind in zip(schema, values, strict=True)])


def _named_columns(rows: pa.Table, fields: RecordFields, value: pa.Array | pa.ChunkedArray, where: str) -> pa.Table:
    """The records of rows with these values, and what else the fields name."""
    columns: dict[str, Any] = {"value": value}
    if fields.key is not None:
        columns["key"] = _as_bytes(rows.column(fields.key))
    if fields.op is not None:
        columns["op"] = _as_op(rows.column(fields.op), where)
    if fields.timestamp is not None:
        columns["timestamp"] = as_time(rows.column(fields.timestamp), where, truncates=fields.truncates_times)
    if fields.headers:
        columns["headers"] = _as_headers({name: _as_bytes(rows.column(name)).to_pylist() for name in fields.headers})
    return pa.table(columns)


def _encoded(rows: pa.Table, fields: RecordFields, codec: Codec | None) -> pa.Array:
    """The rows as values: in the log's format, else as JSON objects."""
    if codec is None:
        return Json(rows.schema).encode(rows)
    beside = {fields.key, fields.op, fields.timestamp, *fields.headers} - set(codec.schema.names)
    return codec.encode(rows.select([name for name in rows.column_names if name not in beside]))


def _as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as bytes: text as UTF-8, numbers and others as their text."""
    kind = column.type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)):
        column = column.cast(pa.string())
    return column.cast(pa.binary())


def _as_headers(found: Mapping[str, Sequence[bytes | None]]) -> pa.Array:
    rows = [
        [(name, text) for name, text in zip(found, texts, strict=True) if text is not None]
        for texts in zip(*found.values(), strict=True)
    ]
    return pa.array(rows, RECORD_SCHEMA.field("headers").type)


def _as_op(column: pa.ChunkedArray, where: str) -> pa.Array:
    if pa.types.is_integer(column.type):
        return column.cast(pa.int8())
    found = pc.index_in(pc.utf8_lower(pc.fill_null(column.cast(pa.string()), "put")), value_set=_OPS)
    if found.null_count:
        wrong = column.filter(pc.is_null(found))[0]
        raise InvalidInput(f"{where} has the operation {str(wrong)[:40]!r}: use put, delete or purge.")
    return found.cast(pa.int8())


# --- lines --------------------------------------------------------------------------------------------------------


def _from_lines(stream: io.BufferedReader, fields: RecordFields, codec: Codec | None, where: str) -> Iterator[pa.Table]:
    """The records of JSON lines: those that a command wrote as they are; else the value is the line, or one of its
    fields. Empty lines are skipped.
    """
    names = fields.named
    decode = _line_decoder(names)
    is_first, is_written = True, False
    for numbers, lines in _line_groups(stream):
        is_written = is_written or (is_first and not names and is_record(lines[0]))
        if is_written:
            places = (f"{where}, line {number:,}," for number in numbers)
            yield record_table(list(map(parse_record, lines, places)), now=CLOCK.now())
            continue
        found: dict[str, list[bytes]] = {name: [] for name in names}
        for number, text in zip(numbers, lines, strict=True):
            try:
                row = decode(text.decode())  # all of it is checked, not only the fields that are named
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidInput(f"{where}, line {number:,}, is no JSON object: {error}") from error
            for name, raw in zip(names, row, strict=True):
                found[name].append(bytes(raw))
        if is_first:
            _check_found(found, fields, where)
            is_first = False
        values = {name: [_plain(raw) for raw in raws] for name, raws in found.items()}
        yield _line_records(lines, values, fields, codec, where, numbers)


def _line_decoder(names: Sequence[str]) -> Callable[[str], Sequence[msgspec.Raw]]:
    """Decodes a line to its named fields; one that it does not have is empty."""
    if any(letter in '"\\' or ord(letter) < _FIRST_PRINTABLE for name in names for letter in name):
        plain = msgspec.json.Decoder(dict[str, msgspec.Raw])  # slower; a struct cannot have such names

        def looked_up(text: str) -> Sequence[msgspec.Raw]:
            row = plain.decode(text)
            return [row.get(name, _ABSENT) for name in names]

        return looked_up
    line = msgspec.defstruct(
        "Line",
        [(f"field_{number}", msgspec.Raw, _ABSENT) for number in range(len(names))],
        rename={f"field_{number}": name for number, name in enumerate(names)},
    )
    decoder = msgspec.json.Decoder(line)
    return lambda text: msgspec.structs.astuple(decoder.decode(text))


def _check_found(found: Mapping[str, Sequence[bytes]], fields: RecordFields, where: str) -> None:
    """``InvalidInput`` if no line has the field of the key, or of the value: its name is wrong."""
    for name in (fields.key, fields.value):
        if name is not None and not any(found[name]):
            raise InvalidInput(f"{where} has no field {name!r} in its first {len(found[name]):,} objects.")


def _line_groups(stream: io.BufferedReader) -> Iterator[tuple[Sequence[int], Sequence[bytes]]]:
    """Groups of non-empty lines, with their numbers in the file, from 1 on."""
    count = 0
    while lines := stream.readlines(_LINES_AT_ONCE):
        if not count:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        found = {number: line for number, line in enumerate(lines, count + 1) if line.strip()}
        count += len(lines)
        if found:
            yield list(found), list(found.values())


def _plain(raw: bytes) -> bytes | None:
    """A field's text: that of a string, null as None, anything else as its JSON."""
    if raw in (b"", b"null"):
        return None
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw


def _line_records(
    lines: Sequence[bytes],
    found: dict[str, list[bytes | None]],
    fields: RecordFields,
    codec: Codec | None,
    file: str,
    numbers: Sequence[int],
) -> pa.Table:
    where = f"{file}, within lines {numbers[0]:,} to {numbers[-1]:,},"
    texts = pa.array([line.removesuffix(b"\n").removesuffix(b"\r") for line in lines], pa.binary())
    # As text, which binary columns are made of again: operations and times are text.
    rows = pa.table({name: pa.array(values, pa.binary()).cast(pa.string()) for name, values in found.items()})
    whole = fields.value is None
    value = _line_values(texts, codec, file, numbers) if whole else _as_bytes(rows.column(fields.value))
    return _named_columns(rows, fields, value, where)


def _line_values(lines: pa.Array, codec: Codec | None, file: str, numbers: Sequence[int]) -> pa.Array:
    """The lines themselves, or in the format of the log; ``InvalidInput`` for one that does not fit its schema."""
    if codec is None:
        return lines
    decoded = Json(codec.schema).decode(lines)
    if decoded.bad.num_rows:
        row, reason = (decoded.bad.column(name)[0].as_py() for name in ("row", "reason"))
        raise InvalidInput(f"{file}, line {numbers[row]:,}, does not fit the log's schema: {reason}")
    return lines if codec.name == "json" else codec.encode(decoded.columns)
