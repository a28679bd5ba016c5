"""Supervisor of a watch: restarts it after errors, with back-off, and reports its health."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

from strandline.errors import (
    CorruptData,
    CursorExpired,
    InvalidInput,
    MissingExtra,
    NullKey,
    UnsupportedVersion,
    UsedAcrossFork,
)
from strandline.followers.watch.run import AppliedWatch, Options, Resume, finishing
from strandline.kv.contract import KeyValueReader, Watcher
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.sink import Store
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.retry import Backoff
from strandline.storage.worker_thread import WorkerThread

_LOGGER: Final = logging.getLogger(__name__)
_HOPELESS: Final = (
    CursorExpired,  # of a resume it is made good: here not even the reader could tell what is present
    InvalidInput,
    MissingExtra,
    CorruptData,
    UnsupportedVersion,
    NullKey,
    UsedAcrossFork,
)
"""What the same call, made again, would only raise again."""

RESTARTS: Final = Backoff(attempts=1 << 30, base=0.1, ceiling=30.0)
"""How patiently a supervisor tries by default: for ever, at most half a minute apart."""


@dataclass(frozen=True, slots=True)
class WatchState:
    """How a supervised watch is.

    ``waiting`` means that it failed and will be tried again, ``failed`` that it will not.
    """

    phase: Literal["idle", "running", "waiting", "stopped", "failed"] = "idle"
    cursor: Cursor | None = None
    """The last cursor that was applied, as far as this supervisor has heard."""
    restarts: int = 0
    error: BaseException | None = None
    """Why it is waiting or failed; while it runs, why it was restarted last."""


@bound_to_process(close=("close", "halt"))
@checked
class Supervisor:
    """Runs :func:`~strandline.followers.watch.api.watch_applied` again and again until it is told to stop.

    After an error it waits, longer each time as long as nothing is applied in between, and resumes from the store's
    cursor; without a store, from the last cursor that was applied. It remembers the keys that were applied and not
    stored, so that state in this process stays right even if they vanish before the next try. An error that repeating
    cannot cure, or ``restarts.attempts`` in a row without progress, ends it. All other options are those of
    ``watch_applied``.

    >>> from strandline.kv.memory import MemoryKeyValue
    >>> kv, seen = MemoryKeyValue(), []
    >>> version = kv.put("a", b"1")
    >>> supervisor = Supervisor(kv, seen.extend, on_applied=lambda cursor: supervisor.halt())
    >>> supervisor.run().next
    1
    >>> supervisor.state().phase, [update.key for update in seen]
    ('stopped', [b'a'])
    """

    def __init__(
        self,
        watcher: Watcher,
        apply: Callable[[Sequence[Any]], object],
        *,
        reader: KeyValueReader | None = None,
        store: Store | None = None,
        resume: Resume = "stored",
        on_applied: Callable[[Cursor], object] | None = None,
        on_state: Callable[[WatchState], object] | None = None,
        restarts: Backoff = RESTARTS,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
        **options: Any,
    ) -> None:
        """Nothing runs yet: call :meth:`run`, or :meth:`start` for a thread of its own."""
        self._watcher = watcher
        self._apply = apply
        self._reader = reader
        self._store = store
        self._resume: Resume = resume
        self._on_applied = on_applied
        self._on_state = on_state
        self._restarts = restarts
        self._clock = clock
        self._chance = chance
        self._options = Options(on_applied=self._heard, afloat=None if store is None else set(), **options)
        self._halt = threading.Event()
        self._changed = threading.Condition()
        self._state = WatchState()
        self._failures = 0
        self._thread: WorkerThread | None = None
        self._origin = Origin("A supervised watch", self)

    # --- running -----------------------------------------------------------------------------------------------

    def run(self) -> Cursor | None:
        """Watch until told to stop, or until the stream ends; returns the applied cursor.

        Raises what ended it for good. A stop while it waits for its next try is a normal end; the state has the error.
        """
        while not self._halt.is_set():
            self._become(phase="running")
            try:
                with finishing() as finish:
                    cursor = AppliedWatch(
                        self._watcher, self._apply, self._reader, self._store, self._options, self._halt, self._clock,
                        finish,
                    ).run(self._resume)  # fmt: skip
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may go well
                self._failed(error)
            except BaseException as error:
                self._become(phase="failed", error=error)
                raise
            else:
                self._become(phase="stopped", cursor=cursor)
                return cursor
        cursor = self._state.cursor if self._store is None else self._store.standing().cursor
        self._become(phase="stopped", cursor=cursor)
        return cursor

    def _heard(self, cursor: Cursor) -> object:
        self._failures = 0
        # A store knows best where it is; without one, this is what a restart goes on from.
        self._resume = "stored" if self._store is not None else cursor
        self._become(phase="running", cursor=cursor)
        return None if self._on_applied is None else self._on_applied(cursor)

    def _failed(self, error: Exception) -> None:
        """Wait before the next try; raises the error if there is to be none."""
        self._failures += 1
        if isinstance(error, _HOPELESS) or self._failures >= self._restarts.attempts:
            self._become(phase="failed", error=error)
            raise error
        pause = self._restarts.pause(self._failures - 1, self._chance.jitter())
        _LOGGER.warning("The watch ended with an error and is restarted in %.1f s: %s", pause, error)
        self._become(phase="waiting", error=error, restarts=self._state.restarts + 1)
        self._clock.wait(self._halt, pause)

    # --- from outside ------------------------------------------------------------------------------------------

    def halt(self) -> None:
        """Ask the watch to stop, and return at once."""
        self._halt.set()

    def start(self) -> Self:
        """Run in a thread of its own."""
        if self._thread is not None:
            raise InvalidInput("This supervisor was started already; make another one.")
        self._thread = WorkerThread(self._run_quietly, name="strandline-watch")
        self._thread.start()
        return self

    def _run_quietly(self) -> None:
        try:
            self.run()
        except Exception:
            _LOGGER.exception("The supervised watch has ended for good.")

    def close(self, timeout: float | None = None) -> WatchState:
        """Stop in good order, wait for that, and say how it ended."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._state

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def state(self) -> WatchState:
        """How the watch is now."""
        return self._state

    def wait_until(self, condition: Callable[[WatchState], bool], timeout: float | None = None) -> bool:
        """Block until the state satisfies a condition (True) or the time is over (False)."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._state), timeout)

    def _become(self, **changes: Any) -> None:
        with self._changed:
            self._state = replace(self._state, **changes)
            self._changed.notify_all()
        if self._on_state is not None:
            self._on_state(self._state)
