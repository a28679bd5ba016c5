"""What operators ask of a process over HTTP: ``/healthz``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, TypeAlias, cast, final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import make_wsgi_app

from strandline.storage.metrics import report_build

Probe: TypeAlias = Callable[[], str | None]
"""Answers why not; None if all is well."""

_READ: Final = ("GET", "HEAD")


@final
class Health:
    """Whether a process works, and whether it is ready: it leads or follows, and knows its position.

    A process that has failed should be restarted, one that is not ready should get no traffic yet.

    >>> health = Health()
    >>> health.not_ready()
    'it is starting'
    >>> health.ready()
    >>> health.not_ready() is None
    True
    """

    def __init__(self) -> None:
        """Of a process that is starting."""
        self.failed: Probe = lambda: None
        self.not_ready: Probe = lambda: "it is starting"

    def ready(self) -> None:
        """It is ready from now on."""
        self.not_ready = lambda: None

    def waits(self, why: str) -> None:
        """It is not ready, for this reason."""
        self.not_ready = lambda: why


def monitoring(health: Health) -> WSGIApplication:
    """The application: health and readiness as 200 or 503 with the reason, metrics for Prometheus, 404 for the rest."""
    metrics = make_wsgi_app()
    report_build()

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        answer = found(environ, start)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else answer

    def found(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in _READ:
            return _text(start, HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are served here")
        match environ.get("PATH_INFO", ""):
            case "/metrics":
                return cast("Iterable[bytes]", metrics(environ, start))
            case "/healthz":
                return _probed(start, health.failed)
            case "/readyz":
                return _probed(start, health.not_ready)
        return _text(start, HTTPStatus.NOT_FOUND, "here are /healthz, /readyz and /metrics")

    return app


def _probed(start: StartResponse, probe: Probe) -> Iterable[bytes]:
    why = probe()
    return _text(start, HTTPStatus.OK, "ok") if why is None else _text(start, HTTPStatus.SERVICE_UNAVAILABLE, why)


def _text(start: StartResponse, status: HTTPStatus, line: str) -> Iterable[bytes]:
    start(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{line}\n".encode()]
