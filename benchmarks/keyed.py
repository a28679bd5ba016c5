"""Keyed state: watching, folding, opening and resuming, beside what the same bytes cost without us."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from statistics import median

import pyarrow as pa

from benchmarks.harness import Result, in_turns, scratch, seconds
from strandline.followers.events import Batching
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.rocks import RocksStore
from strandline.followers.watch.api import watch_applied
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates
from strandline.model.records import Op
from strandline.model.sink import Store

_UPDATES = 300_000
_KEYS = 10_000
_FOLD = 1_000_000
_MISSED = 1_000
_ROUNDS = 5
_VALUE = 100


def _ignore(batch: Sequence[object]) -> None:
    """The cheapest apply there is."""


def _watched(store: Store | None, count: int, batching: Batching | None = None) -> float:
    """Updates per second, from put in one thread to applied (and stored) in another."""
    bucket, stop = MemoryKeyValue(), threading.Event()
    keys, value = [b"key-%06d" % (number % _KEYS) for number in range(count)], b"v" * _VALUE

    def put() -> None:
        for key in keys:
            bucket.put(key, value)

    def heard(cursor: Cursor) -> None:
        if cursor.next >= count:
            stop.set()

    def both() -> None:
        writer = threading.Thread(target=put)
        writer.start()
        options = {} if batching is None else {"batching": batching}
        watch_applied(bucket, _ignore, store=store, on_applied=heard, stop=stop, **options)
        writer.join()

    return count / seconds(both)


def _puts() -> float:
    """Puts per second, in a bucket that nobody watches: how the machine does right now."""
    bucket, value = MemoryKeyValue(), b"v" * _VALUE
    keys = [b"key-%06d" % (number % _KEYS) for number in range(_UPDATES)]

    def put() -> None:
        for key in keys:
            bucket.put(key, value)

    return _UPDATES / seconds(put)


def _watches(folder: str) -> list[Result]:
    rates: dict[str, list[float]] = {"none": [], "puts": [], "plain": [], "synced": [], "wide": []}
    for turn in range(_ROUNDS):
        rates["puts"].append(_puts())
        rates["none"].append(_watched(None, _UPDATES))
        for name, sync, count, batching in (
            ("plain", False, _UPDATES, None),
            ("synced", True, _UPDATES // 10, None),
            ("wide", True, _UPDATES, Batching(records=10_000, window=0.1, queue=10_000)),
        ):
            store = AppendLogStore.open(os.path.join(folder, f"{name}-{turn}"), sync=sync)
            rates[name].append(_watched(store, count, batching))
            store.close()
    beside = f"from put to applied, batches of at most 100; puts alone {median(rates['puts']):,.0f}/s"
    return [
        Result("watch_applied", median(rates["none"]), "updates/s", ">= 300000", beside),
        Result("watch_applied_append_log", median(rates["plain"]), "updates/s", ">= 200000", "the same, not synced"),
        Result("watch_applied_append_log_synced", median(rates["synced"]), "updates/s", "", "the same, each synced"),
        Result("watch_applied_append_log_wide", median(rates["wide"]), "updates/s", "", "synced, at most 10,000"),
    ]


def _tables(rows: int, count: int) -> list[tuple[pa.Table, Cursor, Cursor]]:
    """Ranges of puts to distinct keys, ready to be applied."""
    start = Cursor(MemoryKeyValue().stream, 0)
    made = []
    for at in range(0, count, rows):
        keys = [b"key-%08d" % (number * 7_919 % count) for number in range(at, at + rows)]
        updates = Updates([Op.PUT] * rows, keys, [os.urandom(_VALUE)] * rows, range(at, at + rows), start.at(at + rows))
        made.append((updates.table(), start.at(at), start.at(at + rows)))
    return made


def _rocks(folder: str) -> list[Result]:
    from rocksdict import Options, Rdict, WriteBatch

    results = []
    number = iter(range(1_000))
    for rows in (100, 1_000):
        tables = _tables(rows, 200_000)
        lists = [(table["key"].to_pylist(), table["value"].to_pylist()) for table, _, _ in tables]

        def ours(tables: list[tuple[pa.Table, Cursor, Cursor]] = tables, rows: int = rows) -> None:
            store = RocksStore.open(os.path.join(folder, f"ours-{rows}-{next(number)}"), sync=False)
            for table, since, upto in tables:
                store.apply(table, since=since, upto=upto)
            store.close()

        def raw(lists: list[tuple[list[bytes], list[bytes]]] = lists, rows: int = rows) -> None:
            base = Rdict(os.path.join(folder, f"raw-{rows}-{next(number)}"), Options(raw_mode=True))
            for keys, values in lists:
                batch = WriteBatch(raw_mode=True)
                for key, value in zip(keys, values, strict=True):
                    batch.put(key, value)
                base.write(batch)
            base.close()

        times = in_turns([ours, raw], _ROUNDS)
        rate = 200_000 / median(times[1])
        beside = f"raw write batches of {rows}, {rate:,.0f} keys/s"
        results.append(Result(f"rocksdb_apply_{rows}", median(times[1]) / median(times[0]), "ratio", ">= 0.6", beside))
    return results


def _opening(folder: str) -> list[Result]:
    places = [os.path.join(folder, name) for name in ("once", "often", "compacted")]
    tables = _tables(10_000, _FOLD)
    for place, times in zip(places, (1, 10, 10), strict=True):
        store = AppendLogStore.open(place, sync=False)
        for turn in range(times):
            for table, since, upto in tables:
                moved = turn * _FOLD
                store.apply(table, since=since.at(since.next + moved), upto=upto.at(upto.next + moved))
        if place == places[2]:
            store.compact()
        store.close()

    def opened(place: str) -> Callable[[], None]:
        def act() -> None:
            store = AppendLogStore.open(place)
            if store.get(b"key-00000000") is None:
                raise AssertionError("the fold is not there")
            store.close()

        return act

    once, often, compacted = (median(times) for times in in_turns([opened(place) for place in places], _ROUNDS))
    beside = f"{_FOLD:,} keys of {_VALUE} bytes"
    return [
        Result("append_log_open", once, "s", "<= 2", beside),
        Result("append_log_open_compacted", compacted / once, "ratio", "<= 1.3", "ten rewrites, then compacted"),
        Result(
            "append_log_open_rewritten", often / once, "ratio", "", "ten rewrites, compacted when it happened to be"
        ),
        *_resuming(places[0]),
    ]


def _resuming(place: str) -> list[Result]:
    """How many updates are delivered after a restart that missed a thousand of a million keys."""
    bucket, got = MemoryKeyValue(history=4 * _FOLD), []
    for number in range(_FOLD):
        bucket.put(b"key-%08d" % number, b"")
    store = AppendLogStore.open(place + "-resumed", sync=False)
    stop = threading.Event()

    def until(end: int) -> Callable[[Cursor], None]:
        return lambda cursor: stop.set() if cursor.next >= end else None

    wide = Batching(records=10_000, window=0.01, queue=10_000)
    watch_applied(bucket, _ignore, store=store, reader=bucket, stop=stop, batching=wide, on_applied=until(_FOLD))
    for number in range(_MISSED):
        bucket.put(b"key-%08d" % (number * 31), b"again")
    stop.clear()
    end = _FOLD + _MISSED
    took = seconds(
        lambda: watch_applied(bucket, got.extend, store=store, reader=bucket, stop=stop, on_applied=until(end))
    )
    store.close()
    beside = f"of {_FOLD:,} keys, in {took * 1e3:.0f} ms"
    return [Result("resume_delivers", len(got), "updates", f"<= {_MISSED}", beside)]


def run() -> list[Result]:
    with scratch() as folder:
        return [*_watches(folder), *_rocks(folder), *_opening(folder)]
