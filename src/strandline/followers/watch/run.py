"""The thread of a watch: runs the follower engine on a watcher and a store."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, TypedDict, TypeVar

from strandline.errors import CursorExpired, InvalidInput, NotReady, StorageError, StrandlineError, WatchEnded
from strandline.followers import events
from strandline.followers.engine import Engine
from strandline.followers.events import Batching, Signal
from strandline.followers.stores.state import RuledStore
from strandline.followers.watch.exports import ExportRequest, Exports
from strandline.kv.contract import Ended, KeyValueReader, KeyValueSubscription, Listed, Watcher
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Scope, Update, Updates
from strandline.model.sink import Store, StorePosition
from strandline.storage.env import Env
from strandline.storage.metrics import RESYNCS, STORE_FAILURES, UPDATES_APPLIED, UPDATES_REJECTED

_LOGGER: Final = logging.getLogger(__name__)
_POLL: Final = 0.05
"""Seconds between two checks for a stop or an export request while nothing arrives."""

_GATHERING: Final = 0.001
"""Seconds that a started batch waits for more updates when they arrive one by one."""

T = TypeVar("T")
Resume = Cursor | Literal["stored"] | None

_WINDOW: Final = 0.01
WATCHING: Final = Batching(records=100, window=_WINDOW)
"""Default batching of a watch."""


class WatchOptions(TypedDict, total=False):
    """Options of :func:`~strandline.followers.watch.api.watch_applied` that all faces of a watch take alike."""

    reader: KeyValueReader | None
    scope: Scope
    batching: Batching
    parse: Callable[[Update], Any] | None
    dead_letter: Callable[[Update, Exception], object] | None
    evicted: Literal["drop", "keep"]
    exports: Exports | None


@contextlib.contextmanager
def finishing() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """A function that runs a coroutine to its end in this thread; all share one event loop, created on first use."""
    with contextlib.closing(asyncio.Runner()) as runner:
        yield lambda awaitable: runner.run(awaiting(awaitable))


async def awaiting(awaitable: Awaitable[T]) -> T:
    """An awaitable as a coroutine."""
    return await awaitable


@checked
@dataclass(slots=True)
class AppliedWatch:
    """Executes the engine's actions, and returns their outcomes to it as events."""

    watcher: Watcher
    apply: Callable[[Sequence[Any]], object]
    store: Store | None
    on_applied: Callable[[Cursor], object] | None
    stop: threading.Event | None
    env: Env
    finish: Callable[[Awaitable[Any]], Any]
    reader: KeyValueReader | None = None
    scope: Scope = EVERYTHING
    batching: Batching = WATCHING
    parse: Callable[[Update], Any] | None = None
    dead_letter: Callable[[Update, Exception], object] | None = None
    evicted: Literal["drop", "keep"] = "drop"
    exports: Exports | None = None
    unstored_keys: set[bytes] | None = None
    """Keys that ``apply`` got but the store has not stored since; kept from one run to the next. A resync must delete
    those that vanished, too: the store never had them, but the applied state does."""
    engine: Engine = field(init=False)
    subscription: KeyValueSubscription | None = None
    is_resumed: bool = False
    """Whether the stream was opened at a cursor, or has listed everything: only then can that cursor expire."""
    expired: CursorExpired | None = None
    """The stream said so instead of changes; what was received before is applied and stored first."""
    ahead: Updates | None = None
    trickling: bool = False
    joined: tuple[Sequence[events.SourceDelivery], Updates] | None = None
    waiting: list[ExportRequest] = field(default_factory=list)
    failure: Exception | None = None
    stream_error: Exception | None = None

    def __post_init__(self) -> None:
        can_resync = self.reader is not None and self.store is not None
        self.engine = Engine(self.batching, can_resync=can_resync, usual_window=_WINDOW)

    def run(self, resume: Resume) -> Cursor | None:
        """Watch until the stream ends or ``stop`` is set; returns the applied cursor."""
        try:
            event: events.Event = self._begin(resume)
            while True:
                if self.stop is not None and self.stop.is_set():
                    self.engine.stop()
                self._take_requests()
                action = self.engine.step(event, self.env.clock.monotonic())
                if isinstance(action, events.Finish):
                    return self._finished(action)
                event = self._do(action)
        finally:
            self._take_requests()
            for request in self.waiting:
                request.fail(WatchEnded("The watch ended before it served this export: request it again when it runs."))
            if self.subscription is not None:
                self.subscription.close()

    def _begin(self, resume: Resume) -> events.Event:
        position = StorePosition(None) if self.store is None else self.store.position()
        cursor = position.cursor if resume == "stored" else resume
        if position.resync is not None:
            if not self.engine.can_resync:
                raise NotReady(
                    f"The store is in the middle of a resync with stream {position.resync}: watch with a reader, "
                    "which begins it again."
                )
            return events.Began(position.cursor, unsettled=True)
        if self.store is None:
            return events.Began(cursor)
        if cursor is not None:
            _check_resume(cursor, position.cursor)
            return events.Began(cursor)
        holding = position.cursor is not None or next(self.store.range(), None) is not None
        if holding and not self.engine.can_resync:
            self._warn("Everything is requested and the store is not empty")
            return events.Expired(self._beginning())
        return events.Began(position.cursor if holding else None, unsettled=holding)

    def _beginning(self) -> Cursor | None:
        """The cursor for a store that reloads the whole stream."""
        return None if self.store is None else Cursor(self.watcher.stream, 0)

    def _warn(self, why: str) -> None:
        _LOGGER.warning(
            "%s, and there is no reader with a store to compare with: everything is listed again, and keys that "
            "vanished meanwhile are not removed.",
            why,
        )

    def _finished(self, action: events.Finish) -> Cursor | None:
        if self.stream_error is not None:
            raise self.stream_error
        return self.store.position().cursor if action.doubtful and self.store is not None else action.cursor

    def _do(self, action: events.Action) -> events.Event:  # noqa: PLR0911 - one case for each action
        match action:
            case events.Receive(records=records, seconds=seconds):
                return self._received(records, seconds)
            case events.Apply(chunks):
                self._apply(chunks)
                return Signal.APPLIED
            case events.StoreBatch(write):
                return self._store(write)
            case events.ReportCursor(cursor):
                if self.on_applied is not None:
                    self._call(self.on_applied, cursor)
                return Signal.NOTHING
            case events.Open(cursor):
                return self._open(cursor)
            case events.FindVanishedKeys(given):
                RESYNCS.inc(given is None)
                return events.VanishedKeys(self._vanished(given))
            case events.Export(request):
                self._export(request)
                return Signal.NOTHING
            case events.Pause(seconds):
                self._pause(seconds)
                return Signal.NOTHING
            case events.GiveUp(failures):
                raise StorageError(
                    f"The store failed {failures} times in a row, the last time with: {self.failure}. It stays at its "
                    "cursor; make it work again and resume."
                ) from self.failure
        raise AssertionError(f"a watch has no action {action}")

    def _call(self, function: Callable[..., object], *args: object) -> None:
        result = function(*args)
        if result is not None and inspect.isawaitable(result):
            self.finish(result)

    def _open(self, cursor: Cursor | None) -> events.Event:
        try:
            self.subscription = self.watcher.watch_from(self.scope, cursor)
        except CursorExpired as error:
            if cursor is None:
                raise
            return self._expire(cursor, error)
        self.is_resumed = cursor is not None
        return Signal.OPENED

    def _expire(self, cursor: Cursor | None, error: CursorExpired) -> events.Event:
        if not self.engine.can_resync:
            self._warn(f"The cursor {cursor} has expired ({error})")
        else:
            _LOGGER.info("The cursor %s has expired: starting a resync of the store. %s", cursor, error)
        return events.Expired(self._beginning())

    def _expire_stream(self, error: CursorExpired, seconds: float) -> events.Event:
        """Let a running stream expire as soon as everything that it gave before is applied and stored."""
        if not self.engine.is_settled:
            self._pause(seconds)
            return Signal.NOTHING
        self.expired = None
        if self.subscription is not None:
            subscription, self.subscription = self.subscription, None
            subscription.close()
        return self._expire(self.engine.applied, error)

    def _received(self, room: int, seconds: float) -> events.Event:
        """Receive from the stream. An error ends the watch, but only after the batch received before it is applied.

        If the batch were dropped, only a watch that resumes would get it again, and a stream that fails more often than
        once per window would never make progress.
        """
        if self.expired is not None:
            return self._expire_stream(self.expired, seconds)
        try:
            return self._receive(room, seconds)
        except Exception as error:  # noqa: BLE001 - it is raised when the batch has been applied
            if isinstance(error, CursorExpired) and self.is_resumed:
                self.expired = error
                return self._expire_stream(error, 0.0)
            _LOGGER.info("The stream failed; the received updates are applied, then the watch ends: %s", error)
            self.stream_error = error
            return Signal.STREAM_FAILED

    def _receive(self, room: int, seconds: float) -> events.Event:
        taken: Updates | Listed | Ended | None = self.ahead
        if taken is None:
            taken = self._take(seconds, begun=room < self.batching.records)
        if isinstance(taken, Updates):
            head, self.ahead = taken.split(room)
            if head.upto is None:
                raise InvalidInput("A subscription gave updates without a cursor after them.")
            return events.Received(head, len(head), head.upto, size=head.size)
        self.is_resumed = self.is_resumed or isinstance(taken, Listed)
        return Signal.NOTHING if taken is None else taken

    def _take(self, seconds: float, *, begun: bool) -> Updates | Listed | Ended | None:
        if self.subscription is None:
            raise AssertionError("a stream is opened before it is received from")
        queue = self.batching.queue
        if begun and self.trickling:
            # The batch waits for its window anyway: a wake-up for each update would cost ten times as much.
            self._pause(min(seconds, _GATHERING))
            seconds = 0.0
        taken = self.subscription.take(queue, min(seconds, _POLL))
        self.trickling = not isinstance(taken, Updates) or len(taken) < queue // 4
        return taken

    def _apply(self, chunks: Sequence[events.SourceDelivery]) -> None:
        updates = self._join(chunks)
        batch: Sequence[Any] = updates
        if self.parse is not None:
            batch = self._parsed(updates, self.parse)
            UPDATES_REJECTED.inc(len(updates) - len(batch))
        if batch:
            if self.unstored_keys is not None:
                self.unstored_keys.update(updates.keys)  # before: an apply that raises may have applied a part
            self._call(self.apply, batch)
            UPDATES_APPLIED.inc(len(batch))

    def _join(self, chunks: Sequence[events.SourceDelivery]) -> Updates:
        if self.joined is None or self.joined[0] is not chunks:
            self.joined = (chunks, Updates.joined(chunks))
        return self.joined[1]

    def _parsed(self, updates: Updates, parse: Callable[[Update], Any]) -> list[Any]:
        parsed = []
        for update in updates:
            try:
                value = parse(update)
            except Exception as error:
                if self.dead_letter is None:
                    raise
                self._call(self.dead_letter, update, error)
                continue
            if value is not None:
                parsed.append(value)
        return parsed

    def _store(self, write: events.Write) -> events.Event:
        if self.store is None:
            return Signal.STORED
        try:
            self._write(self.store, write)
        except Exception as error:
            if isinstance(error, StrandlineError) and not isinstance(error, StorageError):
                raise  # refused: a retry would not help
            _LOGGER.warning("The store did not store a batch, which will be retried: %s", error)
            STORE_FAILURES.inc()
            self.failure = error
            return Signal.STORE_FAILED
        if self.unstored_keys is not None and isinstance(write, events.AppliedRange | events.ResyncWrite):
            self.unstored_keys.difference_update(self._join(write.chunks).keys)
        return Signal.STORED

    def _write(self, store: Store, write: events.Write) -> None:
        match write:
            case events.AppliedRange(chunks, since, upto):
                store.apply(
                    _for_store(store, self._join(chunks)), since=upto.at(0) if since is None else since, upto=upto
                )
            case events.BeginResync():
                store.begin_resync(self.watcher.stream)
            case events.ResyncWrite(chunks):
                store.resync(_for_store(store, self._join(chunks)))
            case events.EndResync(cursor):
                position = store.position()
                if position.resync not in (None, cursor.log_id):
                    # The stream was created again meanwhile: the sweep was of the new one.
                    store.begin_resync(cursor.log_id)
                if position != StorePosition(cursor):  # it has ended already if only the answer was lost
                    store.end_resync(cursor)

    def _vanished(self, given: frozenset[bytes] | None) -> list[Updates]:
        """Deletes of keys that are in the store but not in the stream, by the reader's listing or a full watch."""
        if self.store is None or self.reader is None:
            raise AssertionError("a resync needs a store and a reader")
        keep = self.evicted == "keep"
        listing = self.reader.listing(self.scope) if given is None or keep else None
        present = given if given is not None else frozenset() if listing is None else listing.live
        candidates = (key for prefix in self.scope.prefixes for key, _ in self.store.range(prefix))
        unstored_keys = (key for key in sorted(self.unstored_keys or ()) if key in self.scope)
        missing = dict.fromkeys(key for key in chain(candidates, unstored_keys) if key not in present)
        deleted = listing.deleted if keep and listing is not None else None
        vanished = [key for key in missing if deleted is None or key in deleted]
        size = self.batching.records
        return [Updates.removals(vanished[at : at + size]) for at in range(0, len(vanished), size)]

    def _take_requests(self) -> None:
        if self.exports is not None:
            for request in self.exports.taken():
                self.waiting.append(request)
                self.engine.ask(request)

    def _export(self, request: ExportRequest) -> None:
        self.waiting.remove(request)
        if not request.answer.set_running_or_notify_cancel():
            return  # the requester cancelled it
        if self.store is None:
            request.answer.set_exception(InvalidInput("This watch has no store, and so nothing to export."))
            return
        try:
            request.answer.set_result(self.store.export_to(request.folder))
        except Exception as error:  # noqa: BLE001 - raised by the requester's future
            request.answer.set_exception(error)
        except BaseException:
            request.answer.set_exception(WatchEnded("The watch was interrupted during this export: request it again."))
            raise

    def _pause(self, seconds: float) -> None:
        pause = min(seconds, _POLL)
        if self.stop is None:
            self.env.clock.sleep(pause)
        else:
            self.env.clock.wait(self.stop, pause)


def _for_store(store: Store, updates: Updates) -> Any:
    """The updates in the form for the store: a table, unless it is a :class:`RuledStore`."""
    return updates if isinstance(store, RuledStore) else updates.table()


def _check_resume(cursor: Cursor, stored: Cursor | None) -> None:
    if stored is None or stored.log_id != cursor.log_id or cursor.next > stored.next:
        raise InvalidInput(
            f"Resuming at {cursor} would be ahead of the store, which is at {stored}: leave `resume` out, and the "
            "watch resumes at the store's own cursor."
        )
