"""CloudEvents over HTTP: as JSON, batches and binary mode, into any stream and out of it; hostile ones are named."""

import base64
import json
from datetime import UTC, datetime

import pytest
from cloudevents.core.bindings.http import to_binary_event, to_structured_event
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

import strandline as sl
from strandline.serve.http.app import LogEntry
from strandline.serve.http.protocol.cloud_events import BATCH, EVENT, MOST_BYTES
from strandline.serve.http.protocol.records import LINES
from tests.serve.http.client import JSON, TEXT, served

TIME = datetime(2026, 1, 15, 5, 29, 0, 123456, tzinfo=UTC)
PAID = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "shop.paid"}


@pytest.fixture(params=["file", "wal"])
def http(request, tmp_path):
    with served(f"{request.param}://{tmp_path}/streams") as found:
        found.put("orders", headers=JSON)
        yield found


def post(http, event, *, kind=EVENT, stream="orders", path="", **headers):
    body = event if isinstance(event, bytes) else json.dumps(event).encode()
    return http("POST", stream, body, path=f"/v1/stream/{stream}{path}", headers={"Content-Type": kind, **headers})


def events(http, stream="orders", **query):
    answer = http.get(stream, headers={"Accept": BATCH}, **query)
    assert (answer.status, answer["Content-Type"]) == (200, BATCH)
    return json.loads(answer.body)


def records(http, stream="orders"):
    return [json.loads(line) for line in http.get(stream, headers={"Accept": LINES}).body.splitlines()]


SENT = [
    ("application/json", {"id": 1}, "order-1"),
    ("application/json; charset=utf-8", "text", 'ä/%" b'),
    ("application/vnd.shop+json", [1], None),
    (None, {"nothing": "said"}, "order-2"),
    ("text/plain", "good day €", "order-3"),
    ("application/octet-stream", b"\x00\xff", "order-4"),
    ("application/xml", "<a/>", "order-5"),
    (None, None, "order-6"),
]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "structured"])
def test_events_of_the_sdk_come_back_as_they_were_sent(http, binary):
    sent = []
    for number, (kind, given, subject) in enumerate(SENT):
        # The SDK sends a text in binary mode as it is, which is no JSON then.
        data = {"a": given} if binary and kind is not None and "charset" in kind else given
        attributes = {"id": str(number), "source": "/shop", "type": "shop.paid", "time": TIME, "traceparent": "00-a-b"}
        attributes |= {} if kind is None else {"datacontenttype": kind}
        attributes |= {} if subject is None else {"subject": subject}
        event = CloudEvent(attributes, data)
        message = (to_binary_event if binary else to_structured_event)(event)
        assert http("POST", "orders", message.body, headers=message.headers).status == 204, event
        sent.append(event)
    found = [JSONFormat().read(None, json.dumps(event)) for event in events(http)]
    assert [one.get_attributes() for one in found] == [one.get_attributes() for one in sent]
    assert [one.get_data() for one in found] == [one.get_data() for one in sent]
    assert [record.get("key") for record in records(http)] == [subject for _, _, subject in SENT]
    assert {record["timestamp"] for record in records(http)} == {"2026-01-15T05:29:00.123456Z"}


def test_an_event_is_a_record_whose_headers_are_its_attributes(http):
    event = PAID | {"subject": "a", "data": {"n": [1, 2.50]}, "count": 7, "urgent": True, "none": None}
    assert post(http, event | {"datacontenttype": "application/json"}).status == 204
    [found] = records(http)
    assert (found["key"], found["op"], found["value"]) == ("a", "put", '{"n": [1, 2.5]}')
    assert found["headers"] == {
        "ce_specversion": "1.0", "ce_id": "1", "ce_source": "/shop", "ce_type": "shop.paid", "ce_subject": "a",
        "ce_count": "7", "ce_urgent": "true", "content-type": "application/json",
    }  # fmt: skip
    assert http.get("orders").body == b'[{"n": [1, 2.5]}]', "a reader of the stream gets the data"


def test_a_batch_is_one_append(http):
    batch = [PAID | {"id": str(number), "data": number} for number in range(3)]
    assert http.post("orders", json.dumps(batch).encode(), headers={"Content-Type": BATCH}).status == 204
    assert [event["data"] for event in events(http)] == [0, 1, 2]
    again = json.dumps(events(http)).encode()
    assert http.post("orders", again, headers={"Content-Type": BATCH}).status == 204
    assert events(http)[3:] == batch


def test_an_attribute_that_the_request_names_is_the_key(http):
    event = PAID | {"subject": "a", "partitionkey": "customer-7"}
    assert post(http, event, path="?key=partitionkey").status == 204
    assert post(http, event).status == 204
    assert [record["key"] for record in records(http)] == ["customer-7", "a"]
    refused = post(http, PAID, path="?key=partitionkey")
    assert (refused.status, json.loads(refused.body)["field"]) == (422, "partitionkey")
    assert post(http, event, path="?key=Not-A-Name").status == 400
    assert post(http, b'{"key": "a"}', kind=LINES, path="?key=type").status == 400


def test_a_repeated_event_with_a_key_of_idempotency_is_appended_once(http):
    first = post(http, PAID, **{"Idempotency-Key": "1"})
    again = post(http, PAID, **{"Idempotency-Key": "1"})
    assert (first.status, again.status, again.next) == (204, 204, first.next)


def test_attributes_in_headers_do_not_count_beside_an_event_as_json(http):
    assert post(http, PAID, **{"ce-id": "other", "ce-specversion": "0.1"}).status == 204
    assert [event["id"] for event in events(http)] == ["1"]


@pytest.mark.parametrize("body", [b"", b"data"])
def test_an_event_in_binary_mode_is_one_value_in_a_stream_of_its_type(http, body):
    http.put("texts", headers=TEXT)
    headers = {f"ce-{name}": text for name, text in PAID.items()} | TEXT
    assert http("POST", "texts", body, headers=headers).status == 204
    assert http.get("texts").body == body
    assert events(http, "texts") == [PAID | {"datacontenttype": "text/plain"} | ({"data": "data"} if body else {})]


def test_a_closed_stream_takes_no_event_and_a_last_event_closes_one(http):
    headers = {f"ce-{name}": text for name, text in PAID.items()}
    assert http("POST", "orders", b"", headers=headers | {"Stream-Closed": "true"}).status == 204
    assert len(events(http)) == 1
    refused = post(http, PAID)
    assert (refused.status, refused["Stream-Closed"]) == (409, "true")
    assert post(http, PAID, **{"Stream-Seq": "1"}).status == 409


HOSTILE = [
    ({"specversion": "0.3"}, "specversion"),
    ({"specversion": 1.0}, "specversion"),
    ({"specversion": None}, "specversion"),
    ({"id": None}, "id"),
    ({"id": ""}, "id"),
    ({"id": 7}, "id"),
    ({"source": None}, "source"),
    ({"type": None}, "type"),
    ({"type": ["a"]}, "type"),
    ({"subject": ""}, "subject"),
    ({"subject": {"a": 1}}, "subject"),
    ({"time": "yesterday"}, "time"),
    ({"time": "2026-01-15T05:29:00"}, "time"),
    ({"time": "2026-02-30T05:29:00Z"}, "time"),
    ({"datacontenttype": "json"}, "datacontenttype"),
    ({"data": 1, "data_base64": "aGk="}, "data_base64"),
    ({"data_base64": "%"}, "data_base64"),
    ({"data_base64": 7}, "data_base64"),
    ({"data": {"a": 1}, "datacontenttype": "text/plain"}, "data"),
    ({"extension": 1.5}, "extension"),
    ({"extension": 1 << 31}, "extension"),
    ({"extension": {"nested": 1}}, "extension"),
    ({"Extension": "a"}, "Extension"),
    ({"my-extension": "a"}, "my-extension"),
    ({"": "a"}, ""),
    ({"extension": "a\r\nb"}, "extension"),
    ({"extension": "x" * MOST_BYTES}, "extension"),
]


@pytest.mark.parametrize(("change", "field"), HOSTILE, ids=[str(change)[:40] for change, _ in HOSTILE])
def test_what_is_no_event_is_named_by_row_field_and_reason_and_nothing_is_appended(http, change, field):
    refused = post(http, [PAID, PAID | change], kind=BATCH)
    found = json.loads(refused.body)
    assert (refused.status, found["row"], found["field"]) == (422, 1, field)
    assert found["reason"] in found["detail"]
    assert http.get("orders").body == b"[]"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", EVENT, 400),
        (b"[]", EVENT, 422),
        (b"[]", BATCH, 400),
        (b"{}", BATCH, 400),
        (b"[[]]", BATCH, 422),
        (b"[1]", BATCH, 422),
        (b"[[{}]]", BATCH, 422),
        (b"\xff", EVENT, 400),
        (b'{"id": "\xff"}', EVENT, 400),
        (b'{"id": "\\ud800"}', EVENT, 400),
        (b'{"\\ud800": "a"}', EVENT, 400),
        (b"[" * 100_000, BATCH, 400),
        (b'{"a":' * 100_000, EVENT, 400),
        (b'{"specversion": "1.0", "x": ' + b"[" * 900 + b"]" * 900 + b"}", EVENT, 422),
        (b'{"' + b"n" * 1_000_000 + b'": "1"}', EVENT, 422),
        (json.dumps(PAID | {f"a{n}": "" for n in range(20_000)}).encode(), EVENT, 422),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_that_are_no_events_are_refused(http, body, kind, status):
    refused = http.post("orders", body, headers={"Content-Type": kind})
    assert refused.status == status, refused.body
    assert len(refused.body) < 2000
    assert http.get("orders").body == b"[]"


@pytest.mark.parametrize(
    "change",
    [
        {"ce-specversion": None}, {"ce-id": None}, {"ce-id": ""}, {"ce-id": "%FF"}, {"ce-id": "%0D%0Aa"},
        {"ce-my-extension": "a"}, {"ce-data": "a"}, {"ce-datacontenttype": "text/plain"}, {"ce-": "a"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_headers_of_binary_mode_are_named(http, change):
    headers = {f"ce-{name}": text for name, text in PAID.items()} | change | JSON
    refused = http("POST", "orders", b"1", headers={name: text for name, text in headers.items() if text is not None})
    assert (refused.status, json.loads(refused.body)["row"]) == (422, 0)
    assert http.get("orders").body == b"[]"


def test_records_that_came_as_no_event_are_events_of_the_log(http):
    lines = [
        {"key": "a", "value": {"n": 1}, "timestamp": "2026-01-15T05:29:00Z"},
        {"key": "a", "op": "delete", "headers": {f"ce_{name}": text for name, text in PAID.items()}},
        {"key_base64": "/w==", "value_base64": "/w=="},
        {"key": "b", "value": "1", "headers": {"ce_id": "1"}},
        {"value": "2", "headers": {**{f"ce_{name}": text for name, text in PAID.items()}, "ce_data": "3", "ce_A": "4"}},
    ]
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    assert http.post("orders", body, headers={"Content-Type": LINES}).status == 204
    put, delete, raw, partly, kafka = events(http)
    assert put["source"].startswith("urn:uuid:")
    assert put == {
        "specversion": "1.0", "id": "0", "source": put["source"], "type": "strandline.put", "subject": "a",
        "time": "2026-01-15T05:29:00.000000Z", "datacontenttype": "application/json", "data": {"n": 1},
    }  # fmt: skip
    assert (delete["type"], delete["id"], delete["subject"], "data" in delete) == ("strandline.delete", "1", "a", False)
    assert (raw["keybase64"], raw["data_base64"], base64.b64decode(raw["data_base64"])) == ("/w==", "/w==", b"\xff")
    assert (partly["id"], partly["data"]) == ("3", 1)
    assert kafka == PAID | {"data": 2}, "as the binding for Kafka stores events"
    assert [JSONFormat().read(None, json.dumps(event)).get_id() for event in events(http)] == [*"0123", "1"]


def test_the_data_of_an_event_is_checked_where_the_log_names_a_format(tmp_path):
    import pyarrow as pa

    log = sl.open(f"file://{tmp_path}/log", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    with log, served(logs={"orders": LogEntry(log, "application/json")}) as http:
        refused = post(http, [PAID | {"data": {"id": 1}}, PAID | {"data": {"id": "x"}}], kind=BATCH)
        found = json.loads(refused.body)
        assert (refused.status, found["row"], found["field"]) == (422, 1, "id")
        assert log.bounds().next == 0
        assert post(http, PAID | {"data": {"id": 1}}).status == 204
