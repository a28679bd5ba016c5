"""Glue on loopback: the calls that ``pyiceberg`` makes, with the condition on a table's version as AWS describes it.

The answer to an update can be lost on purpose, after it was carried out or before.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self


class _Refused(Exception):
    """The name of an error of Glue."""


@dataclass
class GlueServer:
    """A context manager; ``options`` are those of a catalog of ``pyiceberg``."""

    tables: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    databases: dict[str, dict[str, Any]] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    """What became of each update: ``done``, or the error."""
    lost: list[bool] = field(default_factory=list)
    """For each of the next updates whether it is carried out before its answer is lost."""

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="glue", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def options(self) -> dict[str, str]:
        """Where it is, and who asks; a lost answer is asked for again at once, once."""
        return {
            "glue.endpoint": f"http://127.0.0.1:{self._server.server_port}",
            "glue.region": "us-east-1",
            "glue.access-key-id": "key",
            "glue.secret-access-key": "secret",
        }

    def answer(self, call: str, given: dict[str, Any]) -> dict[str, Any]:
        """What Glue answers to a call."""
        with self._lock:
            name = re.sub(r"(?<!^)([A-Z])", r"_\1", call).lower()
            found: dict[str, Any] = getattr(self, f"_{name}")(given)
            return found

    def _create_database(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["DatabaseInput"]["Name"]
        if name in self.databases:
            raise _Refused("AlreadyExistsException")
        self.databases[name] = given["DatabaseInput"]
        return {}

    def _get_database(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["Name"] not in self.databases:
            raise _Refused("EntityNotFoundException")
        return {"Database": self.databases[given["Name"]]}

    def _create_table(self, given: dict[str, Any]) -> dict[str, Any]:
        key = given["DatabaseName"], given["TableInput"]["Name"]
        if key in self.tables:
            raise _Refused("AlreadyExistsException")
        self.tables[key] = {**given["TableInput"], "DatabaseName": key[0], "VersionId": "0"}
        return {}

    def _found(self, given: dict[str, Any], name: str) -> dict[str, Any]:
        key = given["DatabaseName"], name
        if key not in self.tables:
            raise _Refused("EntityNotFoundException")
        return self.tables[key]

    def _get_table(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"Table": self._found(given, given["Name"])}

    def _update_table(self, given: dict[str, Any]) -> dict[str, Any]:
        loss = self.lost.pop(0) if self.lost else None
        if loss is False:
            raise _Refused("InternalServiceException")
        name = given["TableInput"]["Name"]
        found = self._found(given, name)
        if given.get("VersionId") not in (None, found["VersionId"]):
            self.updates.append("ConcurrentModificationException")
            raise _Refused("ConcurrentModificationException")
        number = str(int(found["VersionId"]) + 1)
        key = given["DatabaseName"], name
        self.tables[key] = {**given["TableInput"], "DatabaseName": key[0], "VersionId": number}
        self.updates.append("done")
        if loss:
            raise _Refused("InternalServiceException")
        return {}

    def _delete_table(self, given: dict[str, Any]) -> dict[str, Any]:
        self._found(given, given["Name"])
        del self.tables[given["DatabaseName"], given["Name"]]
        return {}


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[GlueServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the library's name
        pass

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, told = 200, self.owner.answer(self.headers["X-Amz-Target"].partition(".")[2], given)
        except _Refused as error:
            status, told = 500 if str(error) == "InternalServiceException" else 400, {"__type": str(error)}
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
