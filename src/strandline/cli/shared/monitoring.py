"""``--metrics``: what a long-running command serves about itself over HTTP."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, final

import typer

from strandline.errors import InvalidInput, StrandlineError
from strandline.log.lag import lag_of
from strandline.node.flight.security import is_loopback
from strandline.serve.http_server import serving
from strandline.serve.monitoring import Health, monitoring
from strandline.storage.clock import CLOCK
from strandline.storage.metrics import (
    PIPELINE_LAG_BYTES,
    PIPELINE_LAG_RECORDS,
    PIPELINE_LAG_SECONDS,
)

_HIGHEST_PORT: Final = 65535
_LAG_EVERY: Final = 5.0
"""Seconds between two measurements of a lag."""
_LAGS: Final = (PIPELINE_LAG_RECORDS, PIPELINE_LAG_BYTES, PIPELINE_LAG_SECONDS)


def listening_place(text: str) -> tuple[str, int]:
    """Parse a host and a port.

    >>> listening_place("127.0.0.1:7450"), listening_place("[::1]:0")
    (('127.0.0.1', 7450), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise typer.BadParameter(f"{text!r} is no address to listen on: write host:port, such as 127.0.0.1:7450.")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The options of commands that serve metrics, health and readiness."""

    metrics: Annotated[
        Any,
        typer.Option(
            metavar="HOST:PORT",
            parser=listening_place,
            help="Serve /metrics for Prometheus here, and /healthz and /readyz.",
        ),
    ] = None
    metrics_open: Annotated[
        bool,
        typer.Option("--metrics-open", help="Let other machines read them, in plain text and without authentication."),
    ] = False

    @contextlib.contextmanager
    def served(self) -> Iterator[Health]:
        """Serve them during the block, if a place was given.

        The block says in the health that it yields when the command is ready.
        """
        health = Health()
        if self.metrics is None:
            yield health
            return
        host, port = self.metrics
        if not self.metrics_open and not is_loopback(host):
            raise InvalidInput(
                f"--metrics {host}:{port} can be read by other machines, in plain text and without "
                "authentication: serve them on 127.0.0.1, behind a proxy that authenticates, or give --metrics-open."
            )
        with serving(monitoring(health), self.metrics, what="Metrics"):
            yield health


@final
class FollowerLag:
    """The lag of a command that follows a log, measured by a thread: it is right, too, of a follower that is stuck.

    Nothing is measured unless metrics are served.
    """

    def __init__(self, log: Any, labels: tuple[str, str], position: int | None, *, is_served: bool) -> None:
        """Of a follower at this offset, None if it has none yet; the labels are the log and its target."""
        self._log = log
        self._labels = labels
        self._position = position
        self._is_served = is_served
        self._stop = threading.Event()

    def moved(self, position: int) -> None:
        """Everything below an offset is in the target."""
        self._position = position

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the lag now, and again every few seconds until the block ends."""
        if not self._is_served:
            yield
            return
        measurer = threading.Thread(target=self._measure, name="strandline-lag", daemon=True)
        measurer.start()
        try:
            yield
        finally:
            self._stop.set()
            measurer.join()

    def _measure(self) -> None:
        while True:
            found: tuple[float | None, ...] = (None, None, None)
            with contextlib.suppress(StrandlineError):
                if self._position is not None:
                    lag = lag_of(self._log, self._position, CLOCK.now())
                    found = (lag.records, lag.bytes, lag.seconds)
            for gauge, value in zip(_LAGS, found, strict=True):
                gauge.labels(*self._labels).set(math.nan if value is None else value)
            if self._stop.wait(_LAG_EVERY):
                return
