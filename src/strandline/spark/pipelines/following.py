"""The handle of a running pipeline."""

from __future__ import annotations

import contextlib
import threading
from typing import Final, Protocol, Self

from strandline.errors import StrandlineError
from strandline.followers.routes.progress import RouteProgress
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.spark.pipelines.display import displayed
from strandline.spark.pipelines.progress import PipelineProgress

_STOP_SECONDS: Final = 120.0


class Running(Protocol):
    """What a pipeline's thread runs."""

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set, or up to the end."""

    def cursor(self) -> Cursor | None:
        """The stored cursor; of several tables that of the slowest."""

    def progress(self, *, has_ended: bool) -> PipelineProgress | RouteProgress:
        """The progress as a value; safe in any thread. ``has_ended``: the log may be closed."""

    def cancel(self) -> None:
        """Cancel a running job; safe in any thread."""


class Following:
    """A running pipeline. Leaving its ``with`` block stops it; it can be started again at any time."""

    def __init__(self, running: Running, resources: contextlib.ExitStack, shown: str | None) -> None:
        """Use :func:`follow`. ``shown``: the title under which progress is shown; None: it is not."""
        self._running = running
        self._resources = resources
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._display = contextlib.nullcontext() if shown is None else displayed(shown, self.progress)
        self._thread = threading.Thread(target=self._run, name="strandline-spark-follow", daemon=True)

    def start(self) -> None:
        """Called by :func:`follow`."""
        self._thread.start()

    def __repr__(self) -> str:
        state = "running" if self.active else "ended" if self._failure is None else "failed"
        return f"<pipeline {state}: {self.progress().line()}>"

    def _repr_html_(self) -> str:
        """Its progress as a table, for notebooks."""
        return self.progress()._repr_html_()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with self._resources, self._display:
                self._running.run(self._stopping)
        except BaseException as error:  # noqa: BLE001 - it is raised where the pipeline is awaited
            if not self._stopping.is_set() or not isinstance(error, StrandlineError):
                self._failure = error
        finally:
            self._ended.set()

    @property
    def active(self) -> bool:
        """Whether it is still running."""
        return not self._ended.is_set()

    def cursor(self) -> Cursor | None:
        """The sink's stored cursor; of a route that of its slowest table."""
        return self._running.cursor()

    def progress(self) -> PipelineProgress | RouteProgress:
        """The pipeline's progress; of a route, with that of each table. Reads the log's listing, but no record."""
        return self._running.progress(has_ended=self._ended.is_set())

    @checked
    def await_termination(self, timeout: float | None = None) -> bool:
        """Block until the pipeline has ended (True), or until the timeout (False); raises the error that ended it."""
        if not self._ended.wait(timeout):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def exception(self) -> BaseException | None:
        """The error that ended the pipeline (``Fenced``, ``Gap``, ``CorruptData``…), or None."""
        return self._failure

    def stop(self) -> None:
        """Stop, and return only when nothing of this pipeline is running any more.

        A running job is cancelled: its range is applied by the next run.
        """
        self._stopping.set()
        self._running.cancel()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"A trigger did not end within {_STOP_SECONDS:.0f} seconds of being stopped.")
