"""CloudEvents 1.0 as records, and records as CloudEvents: one as JSON, a batch, and the binary mode of HTTP. Pure.

An event is a put: its data is the value, its subject the key, its time the timestamp. Its attributes are headers as
CloudEvents' binding for Kafka names them (``ce_id``, …, and ``content-type`` for that of the data), so that events
which were ingested from Kafka are events here, too. An event comes out as it went in, but that extensions are text.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import unquote_to_bytes
from uuid import UUID

import msgspec
import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.formats.json.records import InputRecord, record_table, rows_of, time_text
from strandline.model.arguments import shown
from strandline.model.cursor import microseconds
from strandline.model.records import Op
from strandline.serve.http.protocol.bad_rows import BadRow
from strandline.serve.http.protocol.content import checked_type, media_type

EVENT: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"

MOST_BYTES: Final = 64 << 10
"""Names and values of the attributes of one event: CloudEvents asks no receiver to take larger events."""

_BINARY: Final = "ce-"
"""Begins the name of a header of a request that is an attribute."""
_STORED: Final = "ce_"
"""Begins the name of a header of a record that is an attribute."""
_TYPE: Final = "content-type"
"""The header of a record with the type of its data."""

_VERSION: Final = "1.0"
_REQUIRED: Final = ("specversion", "id", "source", "type")
_TEXTS: Final = (*_REQUIRED, "subject", "time", "datacontenttype", "dataschema")
_NAME: Final = re.compile(r"[a-z0-9]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_LARGEST: Final = (1 << 31) - 1
_LONG_NUMBER: Final = re.compile(rb"(?<![0-9])[0-9]{1000}")
"""Digits that may be a number which readers refuse, and with it the whole answer: such data is sent in base64."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MANY: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()
_RAW: Final = msgspec.json.Decoder(msgspec.Raw)


class BadEvent(BadRow):
    """What was sent is no CloudEvent; nothing was appended."""

    def __init__(self, row: int, field: str | None, reason: str) -> None:
        """``field`` is the attribute that is wrong."""
        super().__init__(f"Event {row} is no CloudEvent: {reason}. Nothing was appended.", row, field, reason)


class _Wrong(Exception):
    """What is wrong with an event whose row is not known here."""

    def __init__(self, field: str | None, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = field, reason


def is_event(headers: Mapping[str, str]) -> bool:
    """Whether the headers of a request, whose names are in lower case, have attributes of an event."""
    return any(name.startswith(_BINARY) for name in headers)


def events_of(body: bytes, notation: str, key: str | None, *, now: int) -> pa.Table:
    """The records of one event as JSON, or of a batch; ``key`` is the attribute that is the key, None the subject.

    ``InvalidInput`` for what is no JSON, or an empty batch; :class:`BadEvent` for the first that is no event.

    >>> body = (
    ...     b'[{"specversion": "1.0", "id": "1", "source": "/shop", "type": "paid", "subject": "a", "data": {"n": 1}}]'
    ... )
    >>> events_of(body, BATCH, None, now=0).select(["key", "value"]).to_pylist()
    [{'key': b'a', 'value': b'{"n": 1}'}]
    >>> events_of(b'[{"specversion": "1.0"}]', BATCH, None, now=0)
    Traceback (most recent call last):
    strandline.serve.http.protocol.cloud_events.BadEvent: Event 0 is no CloudEvent: it has no id. Nothing was appended.
    """
    try:
        body.decode()  # the decoder does not look into strings that nobody asks for
        events = _MANY.decode(body) if notation == BATCH else [_RAW.decode(body)]
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        what = "array of CloudEvents" if notation == BATCH else "CloudEvent"
        raise InvalidInput(f"The body is no {what} as JSON ({error}); nothing was appended.") from error
    if not events:
        raise InvalidInput("The batch is empty: give at least one event.")
    return _table([lambda event=event: _of_json(event, key) for event in events], now)  # type: ignore[misc]


def event_of_request(headers: Mapping[str, str], body: bytes, key: str | None, *, now: int) -> pa.Table:
    """The record of an event in binary mode: attributes in headers of the request, and the data is its body.

    >>> headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/shop", "ce-type": "paid", "ce-subject": "%41"}
    >>> event_of_request(headers, b"data", None, now=0).select(["key", "value"]).to_pylist()
    [{'key': b'A', 'value': b'data'}]
    """
    return _table([lambda: _of_headers(headers, body, key)], now)


def checked_key(name: str | None) -> str | None:
    """The name of the attribute that is the key; ``InvalidInput`` for what is no name."""
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidInput(f"key names an attribute of CloudEvents, by small letters and digits: not {shown(name)}.")
    return name


def body_of_events(batches: Sequence[pa.RecordBatch], log_id: UUID, content_type: str) -> bytes:
    """Records as a batch of events; ``content_type`` is that of values that came as no event.

    Such a record has the log as its source, its offset as its id, and ``strandline.put``, ``strandline.delete`` or
    ``strandline.purge`` as its type.
    """
    source, kind = f"urn:uuid:{log_id}", media_type(content_type)
    events = (
        _event_of(row) or _made_event(row, source, kind, content_type) for batch in batches for row in rows_of(batch)
    )
    return b"[" + b",".join(map(msgspec.json.encode, events)) + b"]"


# --- from events to records ---------------------------------------------------------------------------------------


def _table(events: Sequence[Callable[[], InputRecord]], now: int) -> pa.Table:
    records = []
    for row, event in enumerate(events):
        try:
            records.append(event())
        except _Wrong as wrong:
            raise BadEvent(row, wrong.field, wrong.reason) from None
    return record_table(records, now=now)


def _of_json(event: msgspec.Raw, key: str | None) -> InputRecord:
    try:
        fields = _FIELDS.decode(event)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Wrong(None, "it is no JSON object") from error
    data, coded = _present(fields.pop("data", None)), _present(fields.pop("data_base64", None))
    attributes = {name: text for name, raw in fields.items() if (text := _attribute(name, raw)) is not None}
    return _record(attributes, lambda kind: _data(data, coded, kind), key)


def _present(raw: msgspec.Raw | None) -> bytes | None:
    """A member that is there, and not null."""
    found = None if raw is None else bytes(raw).strip()
    return None if found == b"null" else found


def _attribute(name: str, raw: msgspec.Raw) -> str | None:
    """The canonical text of an attribute; None for null, which means that it is not there."""
    try:
        given = _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Wrong(_short(name), f"{shown(_short(name))} cannot be read: {error}") from error
    if given is None or isinstance(given, str):
        return given
    if name in _TEXTS:
        raise _Wrong(name, f"{name} is text, not {type(given).__name__}")
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, int) and -_LARGEST - 1 <= given <= _LARGEST:
        return str(given)
    raise _Wrong(
        _short(name), f"the attribute {shown(_short(name))} is neither text nor true, false or an integer of 32 bits"
    )


def _data(data: bytes | None, coded: bytes | None, content_type: str | None) -> bytes | None:
    if data is not None and coded is not None:
        raise _Wrong("data_base64", "it has both data and data_base64")
    if coded is not None:
        try:
            return base64.b64decode(_ANY.decode(coded), validate=True)
        except (msgspec.DecodeError, RecursionError, TypeError, ValueError, binascii.Error) as error:
            raise _Wrong("data_base64", "data_base64 is not base64") from error
    if data is None or _is_json(content_type):
        return data
    try:
        given = _ANY.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Wrong("data", f"data cannot be read: {error}") from error
    if not isinstance(given, str):
        raise _Wrong("data", f"datacontenttype is {content_type}, and data is no text: give text, or data_base64")
    return given.encode()


def _of_headers(headers: Mapping[str, str], body: bytes, key: str | None) -> InputRecord:
    attributes = {}
    for header, text in headers.items():
        if header.startswith(_BINARY):
            name = header.removeprefix(_BINARY)
            if name == "datacontenttype":
                raise _Wrong(name, "the type of the data is the request's Content-Type: leave out ce-datacontenttype")
            attributes[name] = _from_header(name, text)
    if "content-type" in headers:
        attributes["datacontenttype"] = headers["content-type"]
    return _record(attributes, lambda _: body or None, key)


def _from_header(name: str, text: str) -> str:
    """The text of an attribute in a header: in quotes or not, with percent signs."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = re.sub(r"\\(.)", r"\1", text[1:-1])
    try:
        return unquote_to_bytes(text.encode("latin-1")).decode()
    except UnicodeDecodeError as error:
        raise _Wrong(_short(name), f"the header ce-{_short(name)} is no UTF-8 behind its percent signs") from error


def _record(attributes: dict[str, str], data: Callable[[str | None], bytes | None], key: str | None) -> InputRecord:
    """The record of an event; ``data`` gives its value by the type of the data."""
    _check(attributes)
    found = attributes.get("subject" if key is None else key)
    if found is None and key is not None:
        raise _Wrong(key, f"it has no {key}, which the request names as the key")
    kind = attributes.pop("datacontenttype", None)
    if kind is not None:
        try:
            checked_type(kind)
        except InvalidInput as error:
            raise _Wrong("datacontenttype", f"datacontenttype is no media type: {shown(kind)}") from error
    headers: list[tuple[str, bytes | None]] = [(_STORED + name, text.encode()) for name, text in attributes.items()]
    if kind is not None:
        headers.append((_TYPE, kind.encode()))
    time = None if "time" not in attributes else _microseconds(attributes["time"])
    return InputRecord(None if found is None else found.encode(), data(kind), Op.PUT, time, headers)


def _check(attributes: Mapping[str, str]) -> None:
    size = 0
    for name, text in attributes.items():
        size += len(name) + len(text.encode())
        if size > MOST_BYTES:
            raise _Wrong(_short(name), f"its attributes take more than {MOST_BYTES:,} bytes")
        if not _NAME.fullmatch(name) or name == "data":
            raise _Wrong(_short(name), f"{shown(_short(name))} is no attribute: those are small letters and digits")
        if _CONTROL.search(text):
            raise _Wrong(_short(name), f"{_short(name)} has a control character")
        if not text and name in _TEXTS:
            raise _Wrong(name, f"{name} is empty")
    for name in _REQUIRED:
        if name not in attributes:
            raise _Wrong(name, f"it has no {name}")
    if attributes["specversion"] != _VERSION:
        raise _Wrong("specversion", f"specversion is {shown(attributes['specversion'])}, and this server takes 1.0")


def _microseconds(text: str) -> int:
    given = text.upper()
    try:
        if _TIME.fullmatch(given):
            return microseconds(datetime.fromisoformat(given))
    except (ValueError, OverflowError):
        pass
    raise _Wrong("time", f"time is such as 2026-01-15T05:29:00Z, not {shown(text)}")


def _short(name: str) -> str:
    """A name for a message: whoever sent it knows the rest."""
    return name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…"


_LONGEST_SHOWN: Final = 40


# --- from records to events ---------------------------------------------------------------------------------------


def _event_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The event that a record came as; None if it came as none."""
    if row["op"] != Op.PUT or not row["headers"]:
        return None
    found: dict[str, Any] = {}
    for header, data in row["headers"]:
        name = header.removeprefix(_STORED) if header.startswith(_STORED) else ""
        is_attribute = bool(_NAME.fullmatch(name)) and name not in ("data", "datacontenttype")
        if data is not None and (is_attribute or header == _TYPE):
            try:
                found.setdefault(name or "datacontenttype", data.decode())
            except UnicodeDecodeError:
                return None
    if found.get("specversion") != _VERSION or not all(map(found.get, _REQUIRED)):
        return None
    _add_data(found, row["value"], found.get("datacontenttype"))
    return found


def _made_event(row: Mapping[str, Any], source: str, kind: str, content_type: str) -> dict[str, Any]:
    """The event of a record that came as none."""
    found: dict[str, Any] = {
        "specversion": _VERSION,
        "id": str(row["offset"]),
        "source": source,
        "type": f"strandline.{Op(row['op']).name.lower()}",
    }
    time, key = time_text(row["timestamp"]), row["key"]
    if isinstance(time, str):
        found["time"] = time
    if key:
        try:
            found["subject"] = key.decode()
        except UnicodeDecodeError:
            found["keybase64"] = base64.b64encode(key).decode()
    if row["value"] is not None:
        found["datacontenttype"] = content_type
    _add_data(found, row["value"], kind)
    return found


def _add_data(event: dict[str, Any], value: bytes | None, content_type: str | None) -> None:
    if value is None:
        return
    try:
        if _is_json(content_type) and not _LONG_NUMBER.search(value):
            value.decode()
            _RAW.decode(value)
            event["data"] = msgspec.Raw(value)
            return
        if _is_text(content_type):
            event["data"] = value.decode()
            return
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        pass
    event["data_base64"] = base64.b64encode(value).decode()


def _is_json(content_type: str | None) -> bool:
    """Whether data is JSON: also if nothing is said of it."""
    kind = media_type(content_type or "x/json")
    return kind.endswith(("/json", "+json"))


def _is_text(content_type: str | None) -> bool:
    kind = media_type(content_type or "")
    return kind.startswith("text/") or kind.endswith(("/xml", "+xml"))
