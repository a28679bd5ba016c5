"""``watch_applied`` with coroutines, and ``watch_applied_async``."""

from __future__ import annotations

import asyncio
import threading

import pytest

from strandline.errors import Gap, InvalidInput
from strandline.followers.events import Batching
from strandline.followers.stores.state import MemoryStore
from strandline.followers.watch.api import watch_applied_async
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from tests.followers.scripted_watch import Stage, at, current, held, numbered

PATIENCE = 120.0


def test_apply_and_on_applied_may_be_coroutine_functions_which_are_run_to_their_end_in_turn():
    store, seen = MemoryStore(), []
    stage = Stage(numbered(0, 250), store=store)

    async def apply(batch):
        seen.append(("apply", len(batch), store.position().cursor))
        await asyncio.sleep(0)
        seen.append(("applied", len(batch), store.position().cursor))

    async def on_applied(cursor):
        await asyncio.sleep(0)
        seen.append(("report", cursor.next, store.position().cursor))

    assert stage.run(apply, on_applied=on_applied) == at(250)
    assert [row[:2] for row in seen] == [
        ("apply", 100), ("applied", 100), ("report", 100),
        ("apply", 100), ("applied", 100), ("report", 200),
        ("apply", 50), ("applied", 50), ("report", 250),
    ]  # fmt: skip
    assert [row[2] for row in seen[:5]] == [None, None, at(100), at(100), at(100)]


def test_coroutines_of_one_watch_run_in_one_loop():
    loops = []
    stage = Stage(numbered(0, 250))

    async def apply(_):
        loops.append(asyncio.get_running_loop())

    stage.run(apply)
    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1
    assert loops[0].is_closed()


def test_a_coroutine_that_raises_ends_the_watch_and_the_cursor_stays():
    store = MemoryStore()

    async def apply(_):
        await asyncio.sleep(0)
        raise RuntimeError("cannot")

    with pytest.raises(RuntimeError, match="cannot"):
        Stage(numbered(0, 1), store=store).run(apply)
    assert store.position().cursor is None


def test_the_awaited_watch_runs_coroutines_in_the_callers_loop_and_returns_the_cursor():
    kv, store, loops, reports = MemoryKeyValue(), MemoryStore(), [], []
    for number in range(250):
        kv.put(b"k%d" % number, b"1")
    kv.end()

    async def apply(_):
        loops.append(asyncio.get_running_loop())

    async def main():
        loop = asyncio.get_running_loop()
        cursor = await asyncio.wait_for(
            watch_applied_async(kv, apply, store=store, on_applied=reports.append), PATIENCE
        )
        return cursor, [found is loop for found in loops]

    cursor, ours = asyncio.run(main())
    assert cursor == Cursor(kv.stream, 250) == reports[-1]
    assert ours == [True, True, True]
    assert held(store) == current(kv)


def test_the_awaited_watch_takes_functions_too_and_does_not_block_the_loop():
    kv, entered, release = MemoryKeyValue(), threading.Event(), threading.Event()
    kv.put("a", b"1")
    kv.end()

    def apply(_):
        entered.set()
        assert release.wait(PATIENCE)

    async def main():
        watching = asyncio.ensure_future(watch_applied_async(kv, apply))
        assert await asyncio.to_thread(entered.wait, PATIENCE)
        release.set()  # only a loop that goes on gets here
        return await asyncio.wait_for(watching, PATIENCE)

    assert asyncio.run(main()) == Cursor(kv.stream, 1)


def test_cancelling_the_awaited_watch_stops_it_in_good_order():
    kv, store, applied = MemoryKeyValue(), MemoryStore(), []
    kv.put("a", b"1")

    async def main():
        first, released = asyncio.Event(), asyncio.Event()

        async def apply(batch):
            first.set()
            await released.wait()
            applied.extend(batch)

        watching = asyncio.ensure_future(
            watch_applied_async(kv, apply, store=store, batching=Batching(records=1, window=1.0))
        )
        await asyncio.wait_for(first.wait(), PATIENCE)
        watching.cancel()
        await asyncio.sleep(0)
        assert not watching.done()  # it waits for what is being applied
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(watching, PATIENCE)

    asyncio.run(main())
    assert [update.key for update in applied] == [b"a"]
    assert store.position().cursor == Cursor(kv.stream, 1)


def test_cancelling_the_awaited_watch_flushes_what_is_batched():
    store, taken = MemoryStore(), threading.Event()

    class Watched(MemoryKeyValue):
        def changes(self, scope, position, most, timeout):
            taken.set()  # what was current has been received
            return super().changes(scope, position, most, timeout)

    kv = Watched()
    kv.put("a", b"1")

    async def main():
        watching = asyncio.ensure_future(
            watch_applied_async(kv, lambda _: None, store=store, batching=Batching(records=100, window=1e6))
        )
        assert await asyncio.to_thread(taken.wait, PATIENCE)
        assert store.position().cursor is None
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(watching, PATIENCE)

    asyncio.run(main())
    assert held(store) == {b"a": b"1"}


def test_a_stop_ends_the_awaited_watch_too():
    kv, stop = MemoryKeyValue(), threading.Event()
    kv.put("a", b"1")

    async def main():
        return await asyncio.wait_for(
            watch_applied_async(kv, lambda _: None, stop=stop, on_applied=lambda _: stop.set()), PATIENCE
        )

    assert asyncio.run(main()) == Cursor(kv.stream, 1)


def test_the_awaited_watch_raises_what_ended_it():
    kv, store = MemoryKeyValue(), MemoryStore()
    kv.put("a", b"1")

    async def lose(_):
        kv.put("a", b"2")
        kv.trim(2)

    async def main(**options):
        await asyncio.wait_for(watch_applied_async(kv, lose, **options), PATIENCE)

    with pytest.raises(Gap):
        asyncio.run(main())
    with pytest.raises(InvalidInput, match="ahead"):
        asyncio.run(main(store=store, resume=Cursor(kv.stream, 1)))


def test_an_error_of_the_watch_is_not_lost_when_it_is_cancelled_at_the_same_moment():
    kv = MemoryKeyValue()
    kv.put("a", b"1")

    async def main():
        entered, released = asyncio.Event(), asyncio.Event()

        async def apply(_):
            entered.set()
            await released.wait()
            raise RuntimeError("cannot")

        watching = asyncio.ensure_future(watch_applied_async(kv, apply))
        await asyncio.wait_for(entered.wait(), PATIENCE)
        watching.cancel()
        released.set()
        with pytest.raises(RuntimeError, match="cannot"):
            await asyncio.wait_for(watching, PATIENCE)

    asyncio.run(main())
