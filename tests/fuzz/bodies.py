"""Bodies of HTTP requests: whole records as lines, Arrow and CloudEvents, and what is made of hostile headers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from uuid import UUID

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.model.records import record_batch, with_offsets
from strandline.serve.http.protocol.bad_rows import BadRow
from strandline.serve.http.protocol.cloud_events import BATCH, EVENT, body_of_events
from strandline.serve.http.protocol.records import ARROW, LINES, NOTATIONS, body_of_records, records_sent
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import Target, Try

_LOG = UUID(int=7)
_CE = {
    "specversion": "1.0",
    "id": "1",
    "source": "/shop",
    "type": "paid",
    "subject": "a",
    "time": "2026-01-15T05:29:00Z",
}
_EVENTS = [
    _CE | {"data": {"n": [1, "2"]}, "count": 7, "urgent": True},
    _CE | {"datacontenttype": "text/plain", "data": "text"},
    _CE | {"data_base64": "aGk=", "none": None},
]
_RECORDS = [
    {"key": "a", "value": {"n": 1}, "headers": {"h": "1"}, "timestamp": "2026-01-15T05:29:00Z"},
    {"key_base64": "/w==", "op": "delete"},
]


def _arrow() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"key": [b"a", None], "value": [b"1", b"2"], "op": pa.array([0, 1], pa.int8())})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _shown(records: pa.Table, content_type: str) -> None:
    """Whatever was taken is shown in every notation, as valid JSON."""
    batches = with_offsets(records.to_batches(), 5)
    for notation in NOTATIONS:
        body = body_of_records(batches, notation, _LOG, content_type)
        if notation == BATCH:
            assert len(json.loads(body)) == records.num_rows
        elif notation == LINES:
            assert [json.loads(line)["offset"] for line in body.splitlines()] == [
                5 + row for row in range(len(records))
            ]


def _taken(headers: Callable[[bytes], tuple[dict[str, str], bytes]]) -> Callable[[], AbstractContextManager[Try]]:
    def attempt(data: bytes) -> str:
        try:
            _shown(records_sent(*headers(data), None, now=9), "application/json")
        except (InvalidInput, BadRow) as error:
            return type(error).__name__
        return "fine"

    return lambda: nullcontext(attempt)


def _of_type(kind: str) -> Callable[[bytes], tuple[dict[str, str], bytes]]:
    return lambda data: ({"content-type": kind}, data)


def _headers_of(data: bytes) -> tuple[dict[str, str], bytes]:
    """Lines of names and values as a request's headers, whose names a server gives in lower case."""
    pairs = [line.decode("latin-1").partition(":") for line in data.split(b"\n")]
    return {name.lower(): text.strip() for name, _, text in pairs} | {"ce-id": "1"}, data


def _stored(data: bytes) -> str:
    """Headers that any client may have stored, of a value in any state."""
    found: list[tuple[str, bytes | None]] = [(f"ce_{name}", text.encode()) for name, text in _CE.items()]
    for line in data.split(b"\n"):
        name, _, text = line.partition(b":")
        found.append((name.decode("latin-1"), text or None))
    batch = record_batch(timestamps=[9], ops=[0], keys=[data], values=[data], headers=[found])
    for headers in (batch, batch.slice(0, 1)):
        for kind in ("application/json", "text/plain", "x/y"):
            assert len(json.loads(body_of_events(with_offsets([headers], 0), _LOG, kind))) == 1
    return "fine"


TARGETS = (
    Target(
        "cloud-events",
        mutated((json.dumps(_EVENTS).encode(), json.dumps(_EVENTS[:1]).encode()), is_text=True),
        _taken(_of_type(BATCH)),
    ),
    Target(
        "cloud-event", mutated([json.dumps(one).encode() for one in _EVENTS], is_text=True), _taken(_of_type(EVENT))
    ),
    Target(
        "cloud-event-headers",
        mutated(["".join(f"ce-{name}: {text}\n" for name, text in _CE.items()).encode()]),
        _taken(_headers_of),
    ),
    Target(
        "cloud-events-stored",
        mutated([b"ce_more:1\nce_data:2\ncontent-type:text/plain", b'{"id": 1}']),
        lambda: nullcontext(_stored),
    ),
    Target(
        "record-lines",
        mutated([json.dumps(one).encode() for one in _RECORDS], is_text=True),
        _taken(_of_type(LINES)),
    ),
    Target("record-arrow", mutated([_arrow()]), _taken(_of_type(ARROW))),
)
