"""Schema registries over HTTP: slow, redirecting, and named by a log that somebody else wrote."""

from __future__ import annotations

import http.server
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import InvalidInput, SchemaRefused, TransientStorageError
from strandline.storage.http_get import http_get
from strandline.values.codecs import registry as registries
from strandline.values.recorded import _built, as_version, codec_of

SCHEMA = json.dumps({"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]})
VALUE = pa.array([b"\0\0\0\0\x02\x02"], pa.binary())
WAIT = 60


@contextmanager
def serving(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """A server with this answer: its address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def schema(handler: http.server.BaseHTTPRequestHandler) -> None:
    body = json.dumps({"schema": SCHEMA}).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def redirect_to(url: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        if handler.path.startswith("/moved"):
            schema(handler)
            return
        handler.send_response(302)
        handler.send_header("Location", f"{url}/moved{handler.path}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


@pytest.mark.parametrize("where", ["headers", "body"])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up_in_time(where: str) -> None:
    """Each byte comes within a socket's timeout, and the answer never ends."""
    ended, is_closed = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as line:
            line.recv(1 << 16)
            line.sendall(b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 1000000\r\n\r\n" if where == "body" else b"X-A: "))
            while not ended.wait(0.01):
                try:
                    line.sendall(b"a")
                except OSError:
                    is_closed.set()
                    return

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=(listener,))
    thread.start()
    try:
        with pytest.raises(TimeoutError, match=r"no whole answer came within 0\.2 s"):
            http_get(f"http://127.0.0.1:{listener.getsockname()[1]}/", seconds=0.2, most_bytes=1 << 20)
        assert is_closed.wait(WAIT), "the connection is still open"
    finally:
        ended.set()
        thread.join()


def test_a_redirect_to_another_server_is_not_followed() -> None:
    with serving(schema) as (victim, asked), serving(redirect_to(victim)) as (url, _):
        codec = sl.values.Avro(SCHEMA, registry=url, schema_id=2)
        with pytest.raises(TransientStorageError, match="redirects to another server"):
            codec.decode(VALUE)
        assert asked == []


def test_a_redirect_of_the_same_server_is_followed() -> None:
    with serving(redirect_to("")) as (url, asked):
        assert sl.values.Avro(SCHEMA, registry=url, schema_id=2).decode(VALUE).columns.to_pylist() == [{"id": 1}]
        assert asked == ["/schemas/ids/2", "/moved/schemas/ids/2"]


@pytest.fixture
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process in which no program has named a registry."""
    monkeypatch.setattr(registries, "_named", set())
    monkeypatch.delenv(registries.SETTING, raising=False)


def recorded(url: str, monkeypatch: pytest.MonkeyPatch) -> sl.values.Avro:
    """The codec of a log that names a registry, in another process than the one that recorded it."""
    version = as_version(sl.values.Avro(SCHEMA, registry=url, schema_id=2))
    monkeypatch.setattr(registries, "_named", set())
    _built.cache_clear()
    codec = codec_of(version, "a log")
    assert isinstance(codec, sl.values.Avro)
    return codec


@pytest.mark.usefixtures("nothing_named")
def test_a_registry_that_only_a_log_names_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(schema) as (url, asked):
        codec = recorded(url, monkeypatch)
        for each in (codec, pickle.loads(pickle.dumps(codec))):
            with pytest.raises(InvalidInput, match=f"{url}.*STRANDLINE_REGISTRIES"):
                each.decode(VALUE)
        assert asked == []
        assert as_version(codec).schema == as_version(pickle.loads(pickle.dumps(codec))).schema


@pytest.mark.usefixtures("nothing_named")
def test_a_registry_is_called_if_the_environment_lists_it_or_the_program_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(schema) as (url, asked):
        codec = recorded(url, monkeypatch)
        monkeypatch.setenv(registries.SETTING, f"https://other.example, {url}/")
        assert codec.decode(VALUE).columns.to_pylist() == [{"id": 1}]
        sent = pickle.dumps(codec)
        monkeypatch.delenv(registries.SETTING)
        there = pickle.loads(sent)  # as on an executor, which has another environment
        assert there.decode(VALUE).columns.to_pylist() == [{"id": 1}]
        again = recorded(url, monkeypatch)
        sl.values.Avro(SCHEMA, registry=url, schema_id=2)
        assert again.decode(VALUE).columns.to_pylist() == [{"id": 1}]
        assert len(asked) == 3


@pytest.mark.parametrize("url", ["http://[", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1:x/"])
def test_an_address_that_is_none_is_an_error_and_a_redirect_to_it_no_damage_of_a_value(url: str) -> None:
    with pytest.raises(InvalidInput, match="http://"):
        sl.values.Avro(SCHEMA, registry=url)

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.end_headers()

    with serving(answer) as (place, _), pytest.raises(TransientStorageError, match="could not be fetched"):
        sl.values.Avro(SCHEMA, registry=place).decode(VALUE)


@pytest.mark.parametrize("text", ["no JSON", "[" * 5000, "\ud800"])
def test_a_schema_that_cannot_be_read_is_refused_where_a_codec_is_made_of_it(text: str) -> None:
    with pytest.raises(SchemaRefused):
        sl.values.Avro(registry={1: text}, schema_id=1)
    with pytest.raises(SchemaRefused, match="not in the registry"):
        sl.values.Avro(registry={1: SCHEMA}, schema_id=2)


def doubling(times: int) -> str:
    """Each record has two fields of the one before, and none of them takes bytes."""
    fields: list[object] = [{"name": "a", "type": {"type": "record", "name": "A0", "fields": []}}]
    for at in range(times):
        twice = [{"name": name, "type": f"A{at}"} for name in "xy"]
        fields.append({"name": f"a{at}", "type": {"type": "record", "name": f"A{at + 1}", "fields": twice}})
    return json.dumps({"type": "record", "name": "R", "fields": [*fields, {"name": "id", "type": "long"}]})


EMPTY = {"type": "record", "name": "E", "namespace": "n", "fields": []}


def listing(item: str) -> str:
    fields = [{"name": "e", "type": EMPTY}, {"name": "l", "type": {"type": "array", "items": item}}]
    return json.dumps({"type": "record", "name": "R", "fields": [*fields, {"name": "id", "type": "long"}]})


@pytest.mark.parametrize(
    ("written", "says"),
    [(doubling(30), "more than 10,000 parts"), (listing("n.E"), "without bytes"), (listing("E"), "without bytes")],
)
def test_a_writers_schema_by_which_no_bytes_are_a_huge_value_makes_a_bad_row(written: str, says: str) -> None:
    codec = sl.values.Avro(SCHEMA, registry={1: written})
    decoded = codec.decode(pa.array([b"\0\0\0\0\x01" + b"\xfe\xff\xff\xff\x0f\x00\x02"], pa.binary()))
    (reason,) = decoded.bad.column("reason").to_pylist()
    assert says in reason
