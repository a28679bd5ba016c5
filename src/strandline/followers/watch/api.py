"""``watch_applied``: applies the changes of a key-value store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from strandline.followers.events import Batching
from strandline.followers.watch.exports import Exports
from strandline.followers.watch.run import WATCHING, AppliedWatch, Options, Resume, awaiting, finishing
from strandline.kv.contract import KeyValueReader, Watcher
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Scope, Update
from strandline.model.sink import Store
from strandline.storage.clock import CLOCK, Clock

T = TypeVar("T")


@checked
def watch_applied(
    watcher: Watcher,
    apply: Callable[[Sequence[Any]], object],
    *,
    scope: Scope = EVERYTHING,
    resume: Resume = "stored",
    reader: KeyValueReader | None = None,
    store: Store | None = None,
    exports: Exports | None = None,
    batching: Batching = WATCHING,
    parse: Callable[[Update], Any] | None = None,
    dead_letter: Callable[[Update, Exception], object] | None = None,
    on_applied: Callable[[Cursor], object] | None = None,
    evicted: Literal["drop", "keep"] = "drop",
    stop: threading.Event | None = None,
    clock: Clock = CLOCK,
) -> Cursor | None:
    """Apply every change in scope, in order, and return the cursor below which everything has been applied.

    A cursor moves only after ``apply`` has returned and the ``store``, if there is one, has taken the raw updates and
    the cursor in one atomic write; then ``on_applied`` hears it, once. So whatever dies at whatever moment, a restart
    delivers what was not applied, and perhaps again what was.

    What ``apply`` keeps should live and die with its process, or be built from the store when the next one begins. In a
    database of its own it may keep a key that the store never had: applied, not stored, and deleted before the restart,
    by which time the cursor had expired.

    Args:
        watcher: Where the changes come from.
        apply: Takes a batch: the parsed updates, or without ``parse`` the updates themselves. May be a coroutine
            function. If it raises, the watch ends with that, and the cursor stays.
        scope: Which keys.
        resume: Where to go on; by default at the store's cursor. A cursor ahead of the store is ``InvalidInput``.
            None means a full watch: everything that is current, then changes.
        reader: Lists what is present. With a store it makes good an expired cursor: what vanished meanwhile is
            removed, through ``parse``, ``apply`` and the store, before and after everything is taken anew. Without
            it an expired cursor means a full watch that removes nothing, and one warning.
        store: Takes what was applied. One that fails is tried again, with its batches in order; after 16 failures in
            a row the watch ends. ``apply`` is not called again for them.
        exports: Requests for snapshots of the store.
        batching: When a batch is applied: so many updates, or so long after its first one.
        parse: Turns an update into what ``apply`` takes; None rejects it, and it still counts for the cursor. What it
            raises ends the watch, unless ``dead_letter`` takes it.
        dead_letter: Takes an update that could not be parsed, and why. It counts as rejected then.
        on_applied: Hears each cursor after it has moved. May be a coroutine function.
        evicted: Whether keys that vanished without having been deleted are dropped or kept, where a backend can tell.
        stop: Set it to end the watch in good order: what is batched is applied, what was only received is not.
        clock: The time that windows go by.

    An error of the stream is raised after the batch that was received before it has been applied and stored.

    Raises:
        CursorExpired: if what is present cannot be told any more, as of a trimmed log; nothing was touched. Of a resume
            never: that is made good as above.
        Gap: if changes were lost to retention while it watched; resuming makes that good.
        NotReady: if the store is in the middle of a resync and there is no reader to finish it.
        StorageError: if the backend failed, or the store did too often.
    """
    options = Options(scope, batching, parse, dead_letter, on_applied, evicted, exports)
    with finishing() as finish:
        return AppliedWatch(watcher, apply, reader, store, options, stop, clock, finish).run(resume)


@checked
async def watch_applied_async(
    watcher: Watcher,
    apply: Callable[[Sequence[Any]], object],
    *,
    stop: threading.Event | None = None,
    parse: Callable[[Update], Any] | None = None,
    dead_letter: Callable[[Update, Exception], object] | None = None,
    on_applied: Callable[[Cursor], object] | None = None,
    scope: Scope = EVERYTHING,
    resume: Resume = "stored",
    reader: KeyValueReader | None = None,
    store: Store | None = None,
    exports: Exports | None = None,
    batching: Batching = WATCHING,
    evicted: Literal["drop", "keep"] = "drop",
    clock: Clock = CLOCK,
) -> Cursor | None:
    """The same as :func:`watch_applied`, awaited: the watch runs in a thread, coroutines in the caller's loop.

    Cancelling it stops the watch in good order, and waits for that. If the watch fails meanwhile, that is raised.
    """
    loop = asyncio.get_running_loop()
    halt = stop or threading.Event()

    def finish(awaitable: Awaitable[T]) -> T:
        return asyncio.run_coroutine_threadsafe(awaiting(awaitable), loop).result()

    options = Options(scope, batching, parse, dead_letter, on_applied, evicted, exports)
    watch = AppliedWatch(watcher, apply, reader, store, options, halt, clock, finish)
    running = loop.run_in_executor(None, watch.run, resume)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        halt.set()
        await asyncio.wait([running])
        running.result()  # an error of the watch is not lost in the cancelling
        raise


__all__ = ["WATCHING", "Batching", "Exports", "Resume", "watch_applied", "watch_applied_async"]
