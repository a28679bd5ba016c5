"""Records as text and JSON, and back. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from strandline.errors import InvalidInput
from strandline.model.cursor import Start
from strandline.model.records import Op

_FIELDS: Final = frozenset(
    {"offset", "timestamp", "op", "key", "key_base64", "value", "value_base64", "headers", "headers_base64"}
)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One record to append; ``timestamp`` None means now."""

    key: bytes | None
    value: bytes | None
    op: Op = Op.PUT
    timestamp: int | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None

    def named_headers(self) -> Mapping[str, bytes]:
        """The headers by name; fewer than there are, if a name occurs twice or a value is null."""
        return {name: data for name, data in self.headers or () if data is not None}


def readable(data: bytes | None) -> str:
    r"""Bytes for a terminal: text if they are UTF-8, with control characters escaped, else hexadecimal.

    >>> print(readable("größe\n".encode()), readable(b"\xff\x00"), readable(None))
    größe\n 0xff00 -
    """
    if data is None:
        return "-"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "0x" + data.hex()
    return escaped(text)


def escaped(text: str, keep: str = "") -> str:
    r"""Text with everything that is not printable escaped, except the characters in ``keep``.

    Names, regions, headers and errors may be untrusted. A control character in them could clear the screen, overwrite
    text, or change the direction of writing.

    >>> print(escaped("a\x1b[2Jb\u202ec\n"), escaped("größe"))
    a\x1b[2Jb\u202ec\n größe
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def moment(microseconds: int, form: str = "%Y-%m-%d %H:%M:%S.%f") -> str | None:
    """A time since the epoch in UTC; None if it is outside the calendar: records may have any time.

    >>> moment(1_700_000_000_123_456), moment(-(2**63)), moment(2**63 - 1)
    ('2023-11-14 22:13:20.123456', None, None)
    """
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).strftime(form)
    except OverflowError:
        return None


def to_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as JSON fields. Bytes that are not UTF-8 are under ``key_base64``, ``value_base64`` or
    ``headers_base64``; a header that is there more than once has a list. The record's headers are pairs.

    ``timestamp`` is in microseconds since the epoch; one outside the calendar stays a number.
    """
    time = record["timestamp"]
    fields: dict[str, Any] = {
        "offset": record["offset"],
        "timestamp": moment(time, "%Y-%m-%dT%H:%M:%S.%fZ") or time,
        "op": Op(record["op"]).name.lower(),
    }
    for name in ("key", "value"):
        data = record[name]
        text = None if data is None else _text(data)
        if data is not None and text is None:
            fields[f"{name}_base64"] = base64.b64encode(data).decode()
        else:
            fields[name] = text
    headers = record["headers"]
    if headers and all(data is None or _text(data) is not None for _, data in headers):
        fields["headers"] = _by_name([(name, _text(data)) for name, data in headers])
    elif headers:
        coded = [(name, None if data is None else base64.b64encode(data).decode()) for name, data in headers]
        fields["headers_base64"] = _by_name(coded)
    return fields


def _by_name(pairs: Iterable[tuple[str, str | None]]) -> dict[str, Any]:
    """Headers by name; a name that is there more than once has a list.

    >>> _by_name([("a", "1"), ("b", None), ("a", "2")])
    {'a': ['1', '2'], 'b': None}
    """
    found: dict[str, list[str | None]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def _text(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def parse_json_line(line: bytes, number: int) -> InputRecord:
    """A record from a line of JSON: the inverse of :func:`to_fields`, where a value may also be any JSON.

    ``InvalidInput`` names the line and what is wrong with it.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"Line {number} is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"Line {number} is no JSON object with the fields key, value, op and headers.")
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise InvalidInput(f"Line {number} has the unknown field {unknown[0]!r}; known are {sorted(_FIELDS)}.")
    try:
        return InputRecord(
            key=_bytes(fields, "key"),
            value=_bytes(fields, "value"),
            op=_op(fields.get("op", "put")),
            timestamp=_timestamp(fields.get("timestamp")),
            headers=_headers(fields),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"Line {number} cannot be a record: {error}.") from error


def parse_line(line: bytes, number: int, separator: bytes | None) -> InputRecord:
    r"""A record from a line of text: its value, or with a separator its key and value.

    >>> parse_line(b"a=1\n", 1, b"=")
    InputRecord(key=b'a', value=b'1', op=<Op.PUT: 0>, timestamp=None, headers=None)
    """
    content = line.removesuffix(b"\n").removesuffix(b"\r")
    if separator is None:
        return InputRecord(None, content)
    key, found, value = content.partition(separator)
    if not found:
        raise InvalidInput(f"Line {number} does not hold the key separator {separator.decode()!r}.")
    return InputRecord(key, value)


def parse_start(text: str) -> Start:
    """A position in a log: ``beginning``, ``retained``, ``now``, an offset, or a time of listing.

    >>> parse_start("now"), parse_start("42"), str(parse_start("2026-01-15T05:29Z"))
    ('now', 42, '2026-01-15 05:29:00+00:00')
    """
    match text:
        case "beginning" | "retained" | "now":
            return text
        case _ if text.isdecimal():
            return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r} is neither 'beginning', 'retained' nor 'now', nor an offset, nor a time such as "
            "2026-01-15T05:29:00Z."
        ) from error
    if moment.tzinfo is None:
        raise InvalidInput(f"The time {text!r} has no time zone: write {moment.isoformat()}Z if it is UTC.")
    return moment


def _bytes(fields: Mapping[str, Any], name: str) -> bytes | None:
    coded = fields.get(f"{name}_base64")
    plain = fields.get(name)
    if coded is not None:
        if plain is not None:
            raise ValueError(f"it has both {name} and {name}_base64")
        return _base64(coded)
    if plain is None:
        return None
    if isinstance(plain, str):
        return plain.encode()
    if name == "key":
        raise ValueError(f"a key is text, not {plain!r}")
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def _base64(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{text!r} is not base64") from error


def _op(name: object) -> Op:
    try:
        return Op[str(name).upper()]
    except KeyError as error:
        raise ValueError(f"an op is put, delete or purge, not {name!r}") from error


def _timestamp(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    moment = datetime.fromisoformat(str(value))
    if moment.tzinfo is None:
        raise ValueError(f"the timestamp {value!r} has no time zone")
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86400 + since_epoch.seconds) * 1_000_000 + since_epoch.microseconds


def _headers(fields: Mapping[str, Any]) -> list[tuple[str, bytes | None]] | None:
    plain, coded = fields.get("headers"), fields.get("headers_base64")
    if plain is None and coded is None:
        return None
    if not all(isinstance(given, dict) for given in (plain, coded) if given is not None):
        raise ValueError("headers are a JSON object of texts")
    return [
        *[(name, None if text is None else str(text).encode()) for name, text in _pairs(plain or {})],
        *[(name, None if text is None else _base64(text)) for name, text in _pairs(coded or {})],
    ]


def _pairs(headers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The inverse of :func:`_by_name`, but for the order of different names."""
    for name, given in headers.items():
        yield from ((name, one) for one in (given if isinstance(given, list) else [given]))
