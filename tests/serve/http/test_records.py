"""Whole records over HTTP: JSON lines and Arrow, into streams and out of them, validated where a log names a format."""

import asyncio
import io
import json
from datetime import UTC, datetime
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.model.head import WriterId
from strandline.opening import open_url
from strandline.serve.http import methods
from strandline.serve.http.app import LogEntry
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol import content
from strandline.serve.http.protocol.cloud_events import BATCH
from strandline.serve.http.protocol.records import ARROW, LINES, NOTATIONS
from strandline.storage.env import Env
from strandline.testing import ManualClock
from tests.serve.http.client import JSON, served

RECORDS = [
    {"key": "order-1", "value": {"id": 1}},
    {"key": "order-2", "value": "text", "op": "put"},
    {"key": "order-1", "value": None, "op": "delete"},
    {"key": "other", "value_base64": "/w==", "timestamp": "2026-01-01T00:00:00Z", "headers": {"h": "1"}},
]


def offsets_in(answer):
    """The offsets of the records in an answer, which all came as no event."""
    kind = answer["Content-Type"]
    if kind == ARROW:
        return pa.ipc.open_stream(answer.body).read_all().column("offset").to_pylist()
    if kind == BATCH:
        return [int(event["id"]) for event in json.loads(answer.body)]
    return [json.loads(line)["offset"] for line in answer.body.splitlines()]


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


@pytest.mark.parametrize("notation", NOTATIONS)
def test_records_of_a_key_prefix_from_an_offset(http, notation):
    offset = http.post("orders", lines(RECORDS[:1]), headers={"Content-Type": LINES}).next
    http.post("orders", lines(RECORDS[1:]), headers={"Content-Type": LINES})
    answer = http.get("orders", headers={"Accept": notation}, key_prefix="order-", offset=offset)
    assert offsets_in(answer) == [1, 2]
    assert answer["Stream-Up-To-Date"] == "true"
    assert http.get("orders", key_prefix="order-").status == 400
    assert http.get("orders", headers={"Accept": notation}, path="/v1/stream/orders?key_prefix=").status == 400


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_prefix_that_matches_nothing_makes_progress_up_to_the_end(tmp_path, notation):
    log, count = sl.open(str(tmp_path / "orders"), create=True), 500
    with log.producer() as producer:
        for number in range(count):
            producer.append(key=b"%d" % number, value=bytes(100))
    seen = []
    with served(None, {"orders": LogEntry(log)}, limits=HttpLimits(chunk_bytes=16 << 10)) as http:
        answer = http.get("orders", headers={"Accept": notation}, key_prefix="none")
        while True:
            assert (answer.status, offsets_in(answer)) == (200, [])
            seen.append(int(answer.next.partition("_")[0]))
            if answer["Stream-Up-To-Date"] == "true":
                break
            answer = http.get("orders", headers={"Accept": notation}, key_prefix="none", offset=answer.next)
    assert seen == sorted(set(seen))
    assert len(seen) > 2
    assert seen[-1] == count


def test_a_prefix_without_matches_ends_at_the_end_of_a_closed_stream(http):
    http.post("orders", lines(RECORDS[:1]), headers={"Content-Type": LINES, "Stream-Closed": "true"})
    for more in ({}, {"live": "long-poll", "offset": "-1"}):
        answer = http.get("orders", headers={"Accept": LINES}, key_prefix="none", **more)
        assert (answer.status, answer.body, answer["Stream-Closed"]) == (200, b"", "true")
        again = http.get("orders", headers={"Accept": LINES}, key_prefix="none", live="long-poll", offset=answer.next)
        assert (again.status, again["Stream-Closed"]) == (204, "true")


@pytest.fixture
def timed(tmp_path):
    """A log with a record in each of three seconds, on a clock of the test, and a server of it."""
    clock = ManualClock(now=START * 1_000_000)
    with open_url(str(tmp_path / "timed"), create=True, retention="consumed", env=Env(clock=clock)) as log:
        for number in range(3):
            log.append(pa.table({"key": [b"%d" % number], "value": [b"v"]}), writer=WRITER, number=number).result()
            clock.advance(1.0)
        with served(None, {"orders": LogEntry(log)}) as http:
            yield log, http


START, WRITER = 1_800_000_000, WriterId(UUID(int=7))


def at(seconds):
    return datetime.fromtimestamp(START + seconds, UTC).isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize("notation", NOTATIONS)
def test_records_from_a_time_a_cursor_or_an_offset(timed, notation):
    log, http = timed
    cursor = log.cursor_at(1)
    for since, expected in [
        (at(-100), [0, 1, 2]), (at(0.5), [1, 2]), (at(2), [2]), (at(3), []), ("1", [1, 2]), (str(cursor), [1, 2]),
        ("beginning", [0, 1, 2]), ("retained", [0, 1, 2]), ("now", []), ("3", []),
    ]:  # fmt: skip
        answer = http.get("orders", headers={"Accept": notation}, since=since)
        assert (answer.status, offsets_in(answer)) == (200, expected), since
        assert answer["Cache-Control"] == "no-store", "a time may begin elsewhere later"
        assert http.get("orders", headers={"Accept": notation}, offset=answer.next).status == 200
    assert http.get("orders", since=at(2)).body == b"v"


def test_a_live_read_begins_at_a_time(timed):
    _, http = timed
    answer = http.get("orders", headers={"Accept": LINES}, since=at(1), live="long-poll")
    assert (answer.status, offsets_in(answer)) == (200, [1, 2])
    assert http.get("orders", headers={"Accept": LINES}, since=at(9), live="long-poll").status == 204


def test_what_a_log_does_not_have_is_gone_and_never_another_record(timed, tmp_path):
    log, http = timed
    other = sl.open(str(tmp_path / "other"), create=True)
    with other.producer() as producer:
        producer.append(value=b"1")
    log.slots.create("billing", 1)
    log.trim()
    assert log.bounds().first == 1
    for since, status in [
        ("0", 410), ("beginning", 410), (str(log.cursor_at(0)), 410), (str(other.cursor_at(0)), 410),
        (str(other.cursor_at(1)), 410), ("4", 410), ("9" * 30, 400), ("yesterday", 400), ("2026-01-01T00:00:00", 400),
        ("a/b", 400), ("a/b/c/d/e", 400), (f"{log.log_id}/0/-1", 400),
    ]:  # fmt: skip
        answer = http.get("orders", headers={"Accept": LINES}, since=since)
        assert (answer.status, answer["Content-Type"]) == (status, "application/problem+json"), since
    assert offsets_in(http.get("orders", headers={"Accept": LINES}, since=at(0))) == [1, 2]
    assert http.get("orders", headers={"Accept": LINES}, since="now", offset="-1").status == 400


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
@pytest.mark.parametrize("notation", NOTATIONS)
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
