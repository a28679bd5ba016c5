"""Whole records over HTTP: JSON lines and Arrow, into streams and out of them, validated where a log names a format."""

import asyncio
import io
import json

import pyarrow as pa
import pytest

import strandline as sl
from strandline.serve.http import methods
from strandline.serve.http.app import LogEntry
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol import content
from strandline.serve.http.protocol.records import ARROW, LINES
from tests.serve.http.client import JSON, served

RECORDS = [
    {"key": "order-1", "value": {"id": 1}},
    {"key": "order-2", "value": "text", "op": "put"},
    {"key": "order-1", "value": None, "op": "delete"},
    {"key": "other", "value_base64": "/w==", "timestamp": "2026-01-01T00:00:00Z", "headers": {"h": "1"}},
]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture(params=["file", "wal"])
def http(request, tmp_path):
    with served(f"{request.param}://{tmp_path}/streams") as found:
        found.put("orders", headers=JSON)
        yield found


def test_records_come_back_as_they_were_sent(http):
    assert http.post("orders", lines(RECORDS[:3]), headers={"Content-Type": LINES}).status == 204
    assert http.post("orders", lines(RECORDS[3:]), headers={"Content-Type": LINES}).status == 204
    answer = http.get("orders", headers={"Accept": LINES})
    assert answer["Content-Type"] == LINES
    found = [json.loads(line) for line in answer.body.splitlines()]
    assert [(record["offset"], record["key"], record["op"]) for record in found] == [
        (0, "order-1", "put"),
        (1, "order-2", "put"),
        (2, "order-1", "delete"),
        (3, "other", "put"),
    ]
    assert [record.get("value") for record in found] == ['{"id":1}', "text", None, None]
    assert (found[3]["value_base64"], found[3]["headers"]) == ("/w==", {"h": "1"})
    assert found[3]["timestamp"].startswith("2026-01-01T00:00:00")


def test_arrow_comes_back_as_it_was_sent(http):
    table = pa.table({"key": [b"a", b"b"], "value": [b"1", None], "op": pa.array([0, 1], pa.int8())})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert http.post("orders", sink.getvalue(), headers={"Content-Type": ARROW}).status == 204
    answer = http.get("orders", headers={"Accept": ARROW})
    found = pa.ipc.open_stream(answer.body).read_all()
    assert found.select(["offset", "key", "value", "op"]).to_pylist() == [
        {"offset": 0, "key": b"a", "value": b"1", "op": 0},
        {"offset": 1, "key": b"b", "value": None, "op": 1},
    ]
    assert http.post("orders", answer.body, headers={"Content-Type": ARROW}).status == 204
    assert http("HEAD", "orders").next.startswith("0" * 18 + "4")


def test_records_of_a_key_prefix_from_an_offset(http):
    offset = http.post("orders", lines(RECORDS[:1]), headers={"Content-Type": LINES}).next
    http.post("orders", lines(RECORDS[1:]), headers={"Content-Type": LINES})
    answer = http.get("orders", headers={"Accept": LINES}, prefix="order-", offset=offset)
    assert [json.loads(line)["offset"] for line in answer.body.splitlines()] == [1, 2]
    assert answer["Stream-Up-To-Date"] == "true"
    assert http.get("orders", prefix="order-").status == 400


def test_a_key_of_idempotency_makes_a_repetition_add_nothing(http):
    headers = {"Content-Type": LINES, "Idempotency-Key": "request-7"}
    first = http.post("orders", lines(RECORDS), headers=headers)
    again = http.post("orders", lines(RECORDS), headers=headers)
    assert (first.status, again.status, again.next) == (204, 204, first.next)
    assert http.post("orders", lines(RECORDS), headers={**headers, "Idempotency-Key": "request-8"}).next != first.next


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", LINES),
        (b'{"key": 7}', LINES),
        (b'{"key": "a", "op": "none"}', LINES),
        (b'{"keys": "a"}', LINES),
        (b"\n", LINES),
        (b"\xff", LINES),
        (b"[" * 100_000, LINES),
        (b"", ARROW + "x"),
        (b"nonsense", ARROW),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", ARROW),
    ],
)
def test_what_is_no_record_is_refused_and_appends_nothing(http, body, kind):
    assert http.post("orders", body or b"x", headers={"Content-Type": kind}).status in (400, 409)
    assert http.get("orders").body == b"[]"


def test_a_compressed_arrow_batch_is_refused_before_it_is_unpacked(http):
    table = pa.table({"value": [b"\0" * (8 << 20)]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    refused = http.post("orders", sink.getvalue(), headers={"Content-Type": ARROW})
    assert refused.status == 400
    assert b"compressed" in refused.body


def test_a_value_that_does_not_fit_a_typed_log_is_named_by_row_and_field(tmp_path):
    codec = sl.values.Json(pa.schema({"id": pa.int32(), "name": pa.string()}))
    log = sl.open(f"file://{tmp_path}/log", create=True, value=codec)
    with log, served(logs={"orders": LogEntry(log, "application/json")}) as http:
        assert http.post("orders", b'{"id": 1, "name": "a"}', headers=JSON).status == 204
        bodies = [(b'[{"id": 2}, {"id": "x"}]', JSON), (lines([{"value": {"id": 2}}, {"value": {"id": "x"}}]), None)]
        for body, headers in bodies:
            refused = http.post("orders", body, headers=headers or {"Content-Type": LINES})
            found = json.loads(refused.body)
            assert (refused.status, found["row"], found["field"]) == (422, 1, "id")
            assert "got `str`" in found["reason"]
        assert http.get("orders").body == b'[{"id": 1, "name": "a"}]'


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_bodies_are_taken_apart_beside_the_event_loop(http, monkeypatch, method):
    found = []

    def messages_of(body, content_type):
        found.append(asyncio._get_running_loop())
        return content.messages_of(body, content_type)

    http.put("orders", headers=JSON)
    monkeypatch.setattr(methods, "messages_of", messages_of)
    http(method, "orders" if method == "POST" else "others", b"[1, 2]", headers=JSON)
    assert found == [None], "a body of millions of messages takes seconds, in which nobody else would be answered"


@pytest.mark.parametrize("value", [None, b""])
@pytest.mark.parametrize("notation", [LINES, ARROW])
def test_an_answer_of_records_is_bounded_also_if_their_values_take_nothing(tmp_path, value, notation):
    log, count = sl.open(str(tmp_path / "orders"), create=True), 2000
    with log.producer() as producer:
        for number in range(count):
            producer.append(value=value, key=b"%0100d" % number, op=sl.Op.PUT if value is not None else sl.Op.DELETE)
    offset, found = "-1", 0
    with served(None, {"orders": LogEntry(log)}, limits=HttpLimits(chunk_bytes=32 << 10)) as http:
        while found < count:
            answer = http.get("orders", headers={"Accept": notation}, offset=offset)
            assert len(answer.body) < 128 << 10
            offset = answer.next
            found = int(offset.partition("_")[0])
    assert found == count
