"""``--metrics``: what a long-running command serves about itself over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from strandline.cli.shared.options import flag, option
from strandline.errors import InvalidInput
from strandline.node.flight.security import is_loopback
from strandline.serve.http_server import serving
from strandline.serve.log_state import measure_lag
from strandline.serve.monitoring import Health, monitoring
from strandline.storage.clock import CLOCK

_HIGHEST_PORT: Final = 65535
_LAG_EVERY: Final = 5.0
"""Seconds between two measurements of a lag."""


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
        option("HOST:PORT", "Serve /metrics for Prometheus here, and /healthz and /readyz.", parser=listening_place),
    ] = None
    metrics_open: Annotated[
        bool, flag("Let other machines read them, in plain text and without authentication.", "--metrics-open")
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

    @contextlib.contextmanager
    def lag_of(self, log: Any, labels: tuple[str, str], position: int | None) -> Iterator[Callable[[int], None]]:
        """Measure the lag of a follower now, and again every few seconds until the block ends, if metrics are served.

        A thread measures: the lag is right, too, of a follower that is stuck. The labels are the log and its target;
        ``position`` is None for a follower that has none yet. The block calls what it is given with each later one.
        """
        if self.metrics is None:
            yield lambda _: None
            return
        stop = threading.Event()

        def moved(now: int) -> None:
            nonlocal position
            position = now

        def measure() -> None:
            while True:
                measure_lag(log, labels, position, CLOCK.now())
                if stop.wait(_LAG_EVERY):
                    return

        measurer = threading.Thread(target=measure, name="strandline-lag", daemon=True)
        measurer.start()
        try:
            yield moved
        finally:
            stop.set()
            measurer.join()
