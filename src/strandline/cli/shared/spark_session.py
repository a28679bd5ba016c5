"""The session of ``strandline spark``: started, or found, with one sentence if that fails.

The JVM prints what goes wrong while it starts, with its stack, to the standard error that it inherits. So it inherits a
pipe: what it prints while it starts is held back, and dropped if one sentence says it. Everything later is passed on,
until the session is stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from strandline.cli.shared import output as show
from strandline.errors import InvalidInput, JobFailed, StrandlineError

_PORTS: Final = {"sc": 15002, "spark": 7077, "https": 443, "http": 80}
_CONNECT_SECONDS: Final = 10.0
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_LONGEST: Final = 300
_EMPTY_WORDS: Final = "Exception thrown|Job aborted|An error has occurred"
_CAUSE: Final = re.compile(rf"\b[a-z]\w*(?:\.\w+)*\.(\w*(?:Exception|Error)): (?!{_EMPTY_WORDS})(.+)")
_NOISE: Final = re.compile(r"^\s|WARN|^Using Spark|^Setting default|^To adjust|^Error:|^Exception in thread")
_STDERR: Final = 2
_OF_EVERY_START: Final = re.compile(
    rb"^(?:WARNING: Using incubator modules|Using Spark's default log4j|Setting default log level|To adjust logging)"
    rb".*\n?",
    re.MULTILINE,
)
"""What every start of Spark prints, and nobody needs."""


def started(master: str | None, remote: str | None, settings: dict[str, str]) -> tuple[Any, Callable[[], None] | None]:
    """The session, and how to stop it if it was started here; ``InvalidInput`` for both a master and a remote server.

    What Spark's processes print while they are stopped is dropped: workers complain of closed pipes.
    """
    if master is not None and remote is not None:
        raise InvalidInput("--master and --remote exclude each other: one starts a session, the other uses a server's.")
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active, None
    place = (remote or master or "this machine").partition(";")[0]  # without the parameters, such as a token
    _check_reachable(place)
    if sys.stderr.isatty():
        show.line(f"starting Spark on {place} …", file=sys.stderr)
    with _held_back() as relay:
        try:
            session = _start(master, remote, settings)
        except StrandlineError as error:
            reason = _reason("", relay.printed())
            if not reason:
                raise
            raise JobFailed(f"No session on {place}: {reason}") from error
        except Exception as error:  # Spark's own, the JVM's and gRPC's have no base of their own
            reason = _reason(str(error), relay.printed()) or type(error).__name__
            raise JobFailed(f"No session on {place}: {reason}") from error

    def stop() -> None:
        relay.drop()
        session.stop()

    return session, stop


def _start(master: str | None, remote: str | None, settings: dict[str, str]) -> Any:
    from pyspark.sql import SparkSession

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    if remote is None and (master is None or master.startswith("local")) and not is_submitted:
        from strandline.spark.session import local_session

        conf: dict[str, Any] = {**settings, **({} if master is None else {"spark.master": master})}
        return local_session(cores=len(os.sched_getaffinity(0)), **conf)
    builder: Any = SparkSession.builder.appName("strandline")
    for name, value in {**settings, "spark.sql.session.timeZone": "UTC"}.items():
        builder = builder.config(name, value)
    builder = builder.remote(remote) if remote is not None else builder.master(master) if master else builder
    return builder.getOrCreate()


def _check_reachable(address: str) -> None:
    """``JobFailed`` if nothing listens at a server's address, where Spark would try again for minutes."""
    try:
        place = urlsplit(_kubernetes(address))
        host, port = place.hostname, place.port or _PORTS.get(place.scheme)
    except ValueError:
        return  # several masters; or Spark says what is wrong with it
    if port is None or not host or place.scheme not in _PORTS or any(os.environ.get(name) for name in _PROXIES):
        return
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        why = error.strerror or error
        raise JobFailed(
            f"No session on {address}: {host}:{port} cannot be reached ({why}): start it, or check the address."
        ) from error


def _kubernetes(master: str) -> str:
    """The address of the API server in a master of Kubernetes, as Spark reads it; any other address as it is.

    >>> _kubernetes("k8s://a:6443"), _kubernetes("k8s://http://a"), _kubernetes("spark://a")
    ('https://a:6443', 'http://a', 'spark://a')
    """
    server = master.removeprefix("k8s://")
    return server if server == master or "://" in server else f"https://{server}"


def _reason(text: str, printed: str) -> str:
    r"""Why Spark did not start: the message of an exception, else the first line.

    >>> _reason("An error occurred.\n: org.apache.spark.SparkException: Could not parse Master URL: 'x'\n\tat a", "")
    "Could not parse Master URL: 'x'"
    >>> _reason("a.b.CException: An error has occurred.\nCaused by: java.net.UnknownHostException: k8s.example\n", "")
    'UnknownHostException: k8s.example'
    >>> _reason("[JAVA_GATEWAY_EXITED] Java exited.", "WARNING: a\nInvalid maximum heap size: -Xmxx\nError: b\n")
    'Invalid maximum heap size: -Xmxx'
    """
    for where in (text, printed):
        if found := _CAUSE.findall(where):
            # The deepest cause, with its kind, where the first one is only a name.
            kind, words = next((one for one in found if " " in one[1].strip()), (found[-1][0], ""))
            return (words.strip() or f"{kind}: {found[-1][1].strip()}")[:_LONGEST]
    lines = [line for where in (printed, text) for line in where.splitlines() if line and not _NOISE.search(line)]
    return next(iter(lines), "")[:_LONGEST]


class _Relay:
    """Passes on what arrives in a pipe, once it is released."""

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._held = bytearray()
        self._is_held = True
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="strandline-stderr", daemon=True).start()

    def _run(self) -> None:
        while data := os.read(self._source, 1 << 16):
            with self._lock:
                if self._is_held:
                    self._held += data
                else:
                    self._write(data)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._target, data)

    def printed(self) -> str:
        """What was held back so far."""
        with self._lock:
            return self._held.decode(errors="replace")

    def drop(self) -> None:
        """Hold back what follows, for good."""
        with self._lock:
            self._is_held = True

    def release(self) -> None:
        """Pass on what was held back, and what follows."""
        with self._lock:
            self._write(_OF_EVERY_START.sub(b"", bytes(self._held)))
            self._is_held = False
            self._held.clear()


@contextlib.contextmanager
def _held_back() -> Iterator[_Relay]:
    """Hold back what this process, and a JVM that it starts, write to standard error; after an error it is dropped."""
    sys.stderr.flush()
    own = os.dup(_STDERR)
    source, inherited = os.pipe()
    relay = _Relay(source, own)
    os.dup2(inherited, _STDERR)
    os.close(inherited)
    try:
        yield relay
        relay.release()
    finally:
        sys.stderr.flush()
        os.dup2(own, _STDERR)
