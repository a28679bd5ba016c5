"""A plain HTTP client for the tests of streams, and servers to call."""

import contextlib
import http.client
from dataclasses import dataclass
from urllib.parse import quote

from strandline.serve.http.app import create_app
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.server import serving
from strandline.serve.http.streams import StreamRoot
from strandline.storage.env import SYSTEM

QUICK = HttpLimits(long_poll_seconds=0.2, events_seconds=30, poll_seconds=0.05)
TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    def __getitem__(self, name):
        return self.headers.get(name.lower())

    @property
    def next(self):
        return self["Stream-Next-Offset"]


@dataclass
class Client:
    port: int

    def __call__(self, method, name, body=None, *, path=None, timeout=60, **query_and_headers):
        """``query_and_headers``: ``headers={…}``, and anything else is a query parameter."""
        headers = query_and_headers.pop("headers", {})
        query = "&".join(f"{key}={quote(str(value))}" for key, value in query_and_headers.items())
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            target = f"/v1/stream/{name}" if path is None else path
            connection.request(method, target + (f"?{query}" if query else ""), body, headers)
            found = connection.getresponse()
            return Answer(found.status, {key.lower(): value for key, value in found.getheaders()}, found.read())
        finally:
            connection.close()

    def put(self, name, body=None, headers=TEXT):
        return self("PUT", name, body, headers=headers)

    def post(self, name, body=None, headers=TEXT, **more):
        return self(
            "POST", name, body, headers={**headers, **{key.replace("_", "-"): value for key, value in more.items()}}
        )

    def get(self, name, headers=None, **query):
        return self("GET", name, headers=headers or {}, **query)

    def append_as(self, name, producer, epoch, sequence, body, **more):
        return self.post(
            name, body, Producer_Id=producer, Producer_Epoch=str(epoch), Producer_Seq=str(sequence), **more
        )


@contextlib.contextmanager
def served(root=None, logs=None, *, limits=QUICK, env=SYSTEM, **options):
    """A client of a server with streams under a root address, or a ``StreamRoot``, and configured logs."""
    streams = StreamRoot(root, env=env) if isinstance(root, str) else root
    app = create_app(logs or {}, streams, limits=limits, env=env, **options)
    with serving(app, "127.0.0.1", 0, limits) as port:
        yield Client(port)
