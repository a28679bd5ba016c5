"""An Iceberg REST catalog on loopback: the calls that ``pyiceberg`` makes, answered by its own catalog in SQLite.

Answers can be lost on purpose, with or without the request having been carried out.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal, Self

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest

Fault = Literal[500, 502, 503, 504, "reset"]
"""The status of an answer that is given instead; or the line breaks."""

_STATUS: dict[type[Exception], int] = {
    CommitFailedException: 409,
    TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
    NoSuchTableError: 404,
    NoSuchNamespaceError: 404,
}
_NAMESPACE = r"/v1/namespaces/(?P<namespace>[^/]+)"
_TABLE = _NAMESPACE + r"/tables/(?P<table>[^/]+)"


@dataclass(frozen=True, slots=True)
class _Named:
    """What the catalog needs to know of a table that is committed to."""

    identifier: tuple[str, ...]

    def name(self) -> tuple[str, ...]:
        return self.identifier


@dataclass(slots=True)
class _Loss:
    fault: Fault
    landed: bool
    times: int


@dataclass
class RestCatalogServer:
    """A context manager; ``uri`` is its address. Tables are in ``folder``."""

    folder: str
    commits: list[int] = field(default_factory=list)
    """The statuses of all commits, as the catalog decided."""
    is_closed: bool = False
    _loss: _Loss | None = None

    def __enter__(self) -> Self:
        place = {"uri": f"sqlite:///{self.folder}/catalog.db", "warehouse": f"file://{self.folder}/warehouse"}
        self.catalog = SqlCatalog("rest", **place)
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="rest-catalog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True  # for connections that clients keep open
        self._server.shutdown()
        self._server.server_close()
        self.catalog.close()

    def lose_commits(self, fault: Fault, *, landed: bool, times: int = 1) -> None:
        """The next commits are answered by a fault, after they were carried out or before."""
        self._loss = _Loss(fault, landed, times)

    def loss(self) -> _Loss | None:
        """What happens to the answer of this commit."""
        found = self._loss
        if found is not None:
            found.times -= 1
            if found.times <= 0:
                self._loss = None
        return found


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[RestCatalogServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the library's name
        pass

    def do_GET(self) -> None:
        self._routed("GET", [(r"/v1/config", self._config), (_TABLE, self._load), (_NAMESPACE, self._namespace)])

    def do_HEAD(self) -> None:
        self._routed("HEAD", [(_TABLE, self._load), (_NAMESPACE, self._namespace)])

    def do_DELETE(self) -> None:
        self._routed("DELETE", [(_TABLE, self._drop)])

    def do_POST(self) -> None:
        calls = [(_TABLE, self._commit), (_NAMESPACE + "/tables", self._create), (r"/v1/namespaces", self._new)]
        self._routed("POST", calls)

    def _routed(self, method: str, calls: list[tuple[str, Callable[..., None]]]) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if self.owner.is_closed:
            self._hung_up()
            return
        for pattern, call in calls:
            found = re.fullmatch(pattern, path)
            if found is not None:
                try:
                    call(body, **found.groupdict())
                except tuple(_STATUS) as error:
                    self._refused(_STATUS[type(error)], error)
                except Exception as error:  # noqa: BLE001 - as a server does
                    self._refused(400, error)
                return
        self._refused(404, LookupError(f"{method} {path}"))

    def _refused(self, status: int, error: Exception) -> None:
        text = {"error": {"message": str(error), "type": type(error).__name__, "code": status}}
        self._answer(status, json.dumps(text))

    def _hung_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, text: str = "") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _config(self, _: bytes) -> None:
        self._answer(200, json.dumps({"defaults": {}, "overrides": {}}))

    def _namespace(self, _: bytes, namespace: str) -> None:
        properties = self.owner.catalog.load_namespace_properties(namespace)
        self._answer(200, json.dumps({"namespace": [namespace], "properties": properties}))

    def _new(self, body: bytes) -> None:
        given = json.loads(body)
        self.owner.catalog.create_namespace(tuple(given["namespace"]), given.get("properties") or {})
        self._answer(200, json.dumps({"namespace": given["namespace"], "properties": {}}))

    def _described(self, table: Any) -> None:
        metadata = json.loads(table.metadata.model_dump_json())
        self._answer(200, json.dumps({"metadata-location": table.metadata_location, "metadata": metadata}))

    def _load(self, _: bytes, namespace: str, table: str) -> None:
        self._described(self.owner.catalog.load_table((namespace, table)))

    def _drop(self, _: bytes, namespace: str, table: str) -> None:
        self.owner.catalog.drop_table((namespace, table))
        self._answer(204)

    def _create(self, body: bytes, namespace: str) -> None:
        given = json.loads(body)
        arguments: dict[str, Any] = {"location": given.get("location"), "properties": given.get("properties") or {}}
        identifier = (namespace, given["name"])
        if self.owner.catalog.table_exists(identifier):
            raise TableAlreadyExistsError(f"{'.'.join(identifier)} exists")
        is_staged = given.get("stage-create", False)
        make = self.owner.catalog._create_staged_table if is_staged else self.owner.catalog.create_table
        self._described(make(identifier, Schema.model_validate(given["schema"]), **arguments))

    def _commit(self, body: bytes, namespace: str, table: str) -> None:
        loss = self.owner.loss()
        if loss is None or loss.landed:
            text = self._committed(body, (namespace, table))
            if loss is None:
                self._answer(200, text)
        if loss is not None and loss.fault == "reset":
            self._hung_up()
        elif loss is not None and loss.fault != "reset":
            self._refused(loss.fault, ConnectionError("The answer was lost."))

    def _committed(self, body: bytes, identifier: tuple[str, str]) -> str:
        given = CommitTableRequest.model_validate_json(body)
        named: Any = _Named(identifier)
        try:
            done = self.owner.catalog.commit_table(named, given.requirements, given.updates)
        except (CommitFailedException, TableAlreadyExistsError):
            self.owner.commits.append(409)
            raise
        self.owner.commits.append(200)
        return done.model_dump_json()
