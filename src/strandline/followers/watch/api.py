"""``watch_applied``: applies the changes of a key-value store."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Self, TypeVar, Unpack

from strandline.errors import (
    CorruptData,
    CursorExpired,
    InvalidInput,
    MissingExtra,
    NullKey,
    UnsupportedVersion,
    UsedAcrossFork,
)
from strandline.followers.watch.run import AppliedWatch, Resume, WatchOptions, awaiting, finishing
from strandline.kv.contract import Watcher
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.sink import Store
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.retry import Backoff
from strandline.storage.worker_thread import WorkerThread

T = TypeVar("T")


@checked
def watch_applied(
    watcher: Watcher,
    apply: Callable[[Sequence[Any]], object],
    *,
    resume: Resume = "stored",
    store: Store | None = None,
    on_applied: Callable[[Cursor], object] | None = None,
    stop: threading.Event | None = None,
    env: Env = SYSTEM,
    **options: Unpack[WatchOptions],
) -> Cursor | None:
    """Apply every change in scope, in order, and return the cursor below which everything has been applied.

    A cursor moves only after ``apply`` has returned and the ``store``, if there is one, has stored the raw updates and
    the cursor in one atomic write. So after any crash, a restart delivers the updates that were not applied, and
    perhaps some that were. State that ``apply`` builds should end with its process, or be rebuilt from the store at the
    start: a separate database may keep a key that was applied, not stored, and deleted before the restart.

    Args:
        watcher: The source of the changes.
        apply: Called with a batch of updates, parsed if there is a ``parse``; a coroutine function is awaited. If it
            raises, the watch ends with that error, and the cursor stays.
        resume: Where to resume; by default at the store's cursor. A cursor ahead of the store is ``InvalidInput``.
            None means a full watch: all current values, then changes.
        store: Stores what was applied. A failed write is retried, with its batches in order; after 16 failures in
            a row the watch ends. ``apply`` is not called again for them.
        on_applied: Called once with each cursor after it has moved; a coroutine function is awaited.
        stop: Set it to end the watch cleanly: batched updates are applied, others are discarded.
        env: The clock of the windows.
        options: What a watch, its asyncio face and a supervisor take alike:

            - ``scope``: The keys to watch.
            - ``reader``: Lists the present keys. With a store it repairs an expired cursor: keys that vanished
              meanwhile are deleted, also by ``apply``. Without it an expired cursor means a full watch that deletes
              nothing, and one warning.
            - ``batching``: When a batch is applied: after a number of updates, or a time after its first one.
            - ``parse``: Converts an update for ``apply``; None rejects it, and it still counts for the cursor. An error
              ends the watch, unless there is a ``dead_letter``.
            - ``dead_letter``: Called with an update that could not be parsed, and the error. The update counts as
              rejected.
            - ``evicted``: Whether keys that vanished without a delete are dropped or kept, where a backend can
              distinguish that.
            - ``exports``: Requests for snapshots of the store.

    An error of the stream is raised after the batch that was received before it has been applied and stored.

    Raises:
        CursorExpired: if the present keys cannot be listed any more, as of a trimmed log; nothing was changed. Never
            for an expired ``resume``: that is repaired as above.
        Gap: if retention deleted changes while it watched; resuming repairs that.
        NotReady: if the store is in the middle of a resync and there is no reader to finish it.
        StorageError: if the backend failed, or the store did too often.
    """
    with finishing() as finish:
        return AppliedWatch(watcher, apply, store, on_applied, stop, env, finish, **options).run(resume)


@checked
async def watch_applied_async(
    watcher: Watcher,
    apply: Callable[[Sequence[Any]], object],
    *,
    resume: Resume = "stored",
    store: Store | None = None,
    on_applied: Callable[[Cursor], object] | None = None,
    stop: threading.Event | None = None,
    env: Env = SYSTEM,
    **options: Unpack[WatchOptions],
) -> Cursor | None:
    """The same as :func:`watch_applied`, awaited: the watch runs in a thread, coroutines in the caller's loop.

    Cancelling it stops the watch cleanly, and waits for that. If the watch fails meanwhile, that error is raised.
    """
    loop = asyncio.get_running_loop()
    halt = stop or threading.Event()

    def finish(awaitable: Awaitable[T]) -> T:
        return asyncio.run_coroutine_threadsafe(awaiting(awaitable), loop).result()

    watch = AppliedWatch(watcher, apply, store, on_applied, halt, env, finish, **options)
    running = loop.run_in_executor(None, watch.run, resume)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        halt.set()
        await asyncio.wait([running])
        running.result()  # raises an error of the watch
        raise


_LOGGER: Final = logging.getLogger(__name__)
_FINAL_ERRORS: Final = (
    CursorExpired,  # an expired resume is repaired: here the reader failed to list the keys
    InvalidInput,
    MissingExtra,
    CorruptData,
    UnsupportedVersion,
    NullKey,
    UsedAcrossFork,
)
"""Errors that a repeated call would only raise again."""

RESTARTS: Final = Backoff(attempts=1 << 30, base=0.1, ceiling=30.0)
"""Default back-off of a supervisor: retries forever, with at most half a minute between two tries."""


@dataclass(frozen=True, slots=True)
class WatchState:
    """State of a supervised watch. ``waiting``: it failed and will be retried; ``failed``: it will not."""

    phase: Literal["idle", "running", "waiting", "stopped", "failed"] = "idle"
    cursor: Cursor | None = None
    """The last applied cursor that this supervisor knows."""
    restarts: int = 0
    error: BaseException | None = None
    """Why it is waiting or failed; while it runs, why it was last restarted."""


@bound_to_process(close=("close", "halt"))
@checked
class Supervisor:
    """Runs :func:`~strandline.followers.watch.api.watch_applied` again and again until it is stopped.

    After an error it waits, longer each time while nothing is applied in between, and resumes from the store's cursor;
    without a store, from the last applied one. State in this process stays right even if keys that were applied but not
    stored vanish meanwhile. An error that a retry cannot cure, or ``restarts.attempts`` failures in a row without
    progress, ends it. All other options are those of ``watch_applied``.

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
        store: Store | None = None,
        resume: Resume = "stored",
        on_applied: Callable[[Cursor], object] | None = None,
        on_state: Callable[[WatchState], object] | None = None,
        restarts: Backoff = RESTARTS,
        env: Env = SYSTEM,
        **options: Unpack[WatchOptions],
    ) -> None:
        """Nothing runs yet: call :meth:`run`, or :meth:`start` for a thread of its own."""
        self._store = store
        self._resume: Resume = resume
        self._on_applied = on_applied
        self._on_state = on_state
        self._restarts = restarts
        self._env = env
        self._halt = threading.Event()
        self._watch = partial(
            AppliedWatch, watcher, apply, store, self._record_cursor, self._halt, env,
            unstored_keys=None if store is None else set(), **options,
        )  # fmt: skip
        self._changed = threading.Condition()
        self._state = WatchState()
        self._failures = 0
        self._thread: WorkerThread | None = None
        self._origin = Origin("A supervised watch", self)

    def run(self) -> Cursor | None:
        """Watch until stopped, or until the stream ends; returns the applied cursor.

        Raises the error that ended it for good. A stop while it waits for its next try is a normal end; the state has
        the error.
        """
        while not self._halt.is_set():
            self._set_state(phase="running")
            try:
                with finishing() as finish:
                    cursor = self._watch(finish).run(self._resume)
            except Exception as error:  # noqa: BLE001 - the next try may succeed
                self._failed(error)
            except BaseException as error:
                self._set_state(phase="failed", error=error)
                raise
            else:
                self._set_state(phase="stopped", cursor=cursor)
                return cursor
        cursor = self._state.cursor if self._store is None else self._store.position().cursor
        self._set_state(phase="stopped", cursor=cursor)
        return cursor

    def _record_cursor(self, cursor: Cursor) -> object:
        self._failures = 0
        # A store has its own cursor; without one, a restart resumes from this.
        self._resume = "stored" if self._store is not None else cursor
        self._set_state(phase="running", cursor=cursor)
        return None if self._on_applied is None else self._on_applied(cursor)

    def _failed(self, error: Exception) -> None:
        """Wait before the next try; raises the error if there is none."""
        self._failures += 1
        if isinstance(error, _FINAL_ERRORS) or self._failures >= self._restarts.attempts:
            self._set_state(phase="failed", error=error)
            raise error
        pause = self._restarts.pause(self._failures - 1, self._env.chance.jitter())
        _LOGGER.warning("The watch ended with an error and is restarted in %.1f s: %s", pause, error)
        self._set_state(phase="waiting", error=error, restarts=self._state.restarts + 1)
        self._env.clock.wait(self._halt, pause)

    def halt(self) -> None:
        """Request a stop, and return at once."""
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
        """Stop cleanly, wait for that, and return the final state."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._state

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def state(self) -> WatchState:
        """The current state of the watch."""
        return self._state

    def wait_until(self, condition: Callable[[WatchState], bool], timeout: float | None = None) -> bool:
        """Block until the state satisfies a condition (True), or until the timeout (False)."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._state), timeout)

    def _set_state(self, **changes: Any) -> None:
        with self._changed:
            self._state = replace(self._state, **changes)
            self._changed.notify_all()
        if self._on_state is not None:
            self._on_state(self._state)
