"""Records as JSON: the one notation of ``tail --json``, ``produce --format json``, exports and loads. Pure.

What :func:`record_fields` writes, :func:`parse_record` reads back as the same record; only the order of headers with
different names may change. Exports of earlier builds are read too: their operation is a number, and bytes that are no
text are ``{"base64": ...}``.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.model.arguments import LARGEST_NUMBER, shown
from strandline.model.records import RECORD_SCHEMA, TIMESTAMP, Op

_PRINTED: Final = frozenset({"offset", "timestamp", "op"})
"""Every record that a command wrote has these."""

_FIELDS: Final = _PRINTED | {"key", "key_base64", "value", "value_base64", "headers", "headers_base64"}
_BESIDE: Final = frozenset({"error"})
"""``tail --decode`` says beside a value why it cannot be decoded."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OPS: Final = tuple(op.name.lower() for op in Op)


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One record to append; ``timestamp`` None means now."""

    key: bytes | None
    value: bytes | None
    op: Op = Op.PUT
    timestamp: int | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None


def record_table(records: Sequence[InputRecord], *, now: int) -> pa.Table:
    """Records as a table of the stored schema; those without a time get ``now`` (microseconds)."""
    times = [now if record.timestamp is None else record.timestamp for record in records]
    columns = [
        pa.array(times, pa.int64()).view(TIMESTAMP),
        *([getattr(record, name) for record in records] for name in RECORD_SCHEMA.names[1:]),
    ]
    return pa.table(dict(zip(RECORD_SCHEMA.names, columns, strict=True)), schema=RECORD_SCHEMA)


def rows_of(batch: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """The records of a batch for :func:`record_fields`. Times are numbers: Python has no year 10,000."""
    at = batch.schema.get_field_index("timestamp")
    rows: list[dict[str, Any]] = batch.set_column(at, "timestamp", batch.column(at).cast(pa.int64())).to_pylist()
    return rows


def record_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    r"""A record as JSON fields. Bytes that are not UTF-8 are under ``key_base64``, ``value_base64`` or
    ``headers_base64``; a header that is there more than once has a list. The record's headers are pairs.

    ``timestamp`` is in microseconds since the epoch; one outside the calendar stays a number.

    >>> deleted = {"offset": 7, "timestamp": 0, "op": 1, "key": b"\xff", "value": None, "headers": None}
    >>> record_fields(deleted)
    {'offset': 7, 'timestamp': '1970-01-01T00:00:00.000000Z', 'op': 'delete', 'key_base64': '/w==', 'value': None}
    """
    fields: dict[str, Any] = {
        "offset": record["offset"],
        "timestamp": time_text(record["timestamp"]),
        "op": _OPS[record["op"]],
    }
    for name in ("key", "value"):
        try:
            fields[name] = _text(record[name])
        except UnicodeDecodeError:
            fields[f"{name}_base64"] = _coded(record[name])
    headers = record["headers"]
    if headers is not None:
        try:
            fields["headers"] = _by_name(headers, _text)
        except UnicodeDecodeError:
            fields["headers_base64"] = _by_name(headers, _coded)
    return fields


def is_record(line: bytes) -> bool:
    """Whether a command wrote this line as a record: it has an offset, a time and an operation, and nothing else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and _PRINTED <= fields.keys() <= _FIELDS | _BESIDE


def parse_record(line: bytes, where: str) -> InputRecord:
    """A record from a line of JSON. A value may also be any JSON; offsets are ignored.

    ``InvalidInput`` begins with ``where`` and says what is wrong with the line.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} is no JSON object with the fields key, value, op and headers.")
    unknown = sorted(fields.keys() - _FIELDS - _BESIDE)
    if unknown:
        raise InvalidInput(f"{where} has the unknown field {shown(unknown[0])}; known are {sorted(_FIELDS)}.")
    read = _earlier if type(fields.get("op")) is int else _plain
    try:
        return InputRecord(
            key=_bytes(fields, "key", read),
            value=_bytes(fields, "value", read),
            op=_op(fields.get("op", "put")),
            timestamp=_timestamp(fields.get("timestamp")),
            headers=_headers(fields, read),
        )
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} cannot be a record: {error}.") from error


# --- writing ------------------------------------------------------------------------------------------------------


def time_text(microseconds: int) -> str | int:
    """A time as text; one outside the calendar stays a number."""
    minutes, rest = divmod(microseconds, 60_000_000)
    try:
        text = f"{rest:08}"
        return f"{_minute(minutes)}:{text[:2]}.{text[2:]}Z"
    except OverflowError:
        return microseconds


@lru_cache(1024)
def _minute(minutes: int) -> str:
    """A minute as text: records that follow each other often have the same."""
    return (_EPOCH + timedelta(minutes=minutes)).isoformat()[: len("1970-01-01T00:00")]


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()


def _coded(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _by_name(pairs: Iterable[tuple[str, bytes | None]], write: Callable[[bytes | None], str | None]) -> dict[str, Any]:
    """Headers by name; a name that is there more than once has a list.

    >>> _by_name([("a", b"1"), ("b", None), ("a", b"2")], _text)
    {'a': ['1', '2'], 'b': None}
    """
    found: dict[str, list[str | None]] = {}
    for name, data in pairs:
        found.setdefault(name, []).append(write(data))
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


# --- reading ------------------------------------------------------------------------------------------------------


def _bytes(fields: Mapping[str, Any], name: str, read: Callable[[Any], bytes | None]) -> bytes | None:
    coded, plain = fields.get(f"{name}_base64"), fields.get(name)
    if coded is not None:
        if plain is not None:
            raise ValueError(f"it has both {name} and {name}_base64")
        return _decoded(coded)
    if name == "key" and not isinstance(plain, str | None) and read is _plain:
        raise ValueError(f"a key is text, not {shown(plain)}")
    return read(plain)


def _plain(given: Any) -> bytes | None:
    """Text as UTF-8, null as None, anything else as its JSON."""
    if given is None or isinstance(given, str):
        return None if given is None else given.encode()
    return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode()


def _earlier(given: Any) -> bytes | None:
    """The bytes in a field of an export of an earlier build."""
    if isinstance(given, dict) and given.keys() == {"base64"}:
        return _decoded(given["base64"])
    if given is not None and not isinstance(given, str):
        raise ValueError(f"where op is a number, {shown(given)} is neither text nor base64")
    return _plain(given)


def _decoded(text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except binascii.Error:
        pass
    raise ValueError(f"{shown(text)} is not base64")


def _op(given: object) -> Op:
    try:
        return Op(given) if type(given) is int else Op[str(given).upper()]
    except (KeyError, ValueError) as error:
        raise ValueError(f"an op is put, delete or purge, not {shown(given)}") from error


def _timestamp(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is int:
        if not -LARGEST_NUMBER - 1 <= value <= LARGEST_NUMBER:
            raise ValueError("the timestamp has more than 64 bits")
        return value
    moment = datetime.fromisoformat(str(value))
    if moment.tzinfo is None:
        raise ValueError(f"the timestamp {shown(value)} has no time zone")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _headers(fields: Mapping[str, Any], read: Callable[[Any], bytes | None]) -> list[tuple[str, bytes | None]] | None:
    plain, coded = fields.get("headers"), fields.get("headers_base64")
    if plain is None and coded is None:
        return None
    if not all(isinstance(given, dict) for given in (plain, coded) if given is not None):
        raise ValueError("headers are a JSON object of texts")
    return [
        *((name, read(text)) for name, text in _pairs(plain or {})),
        *((name, None if text is None else _decoded(text)) for name, text in _pairs(coded or {})),
    ]


def _pairs(headers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The inverse of :func:`_by_name`, but for the order of different names."""
    for name, given in headers.items():
        yield from ((name, one) for one in (given if isinstance(given, list) else [given]))
