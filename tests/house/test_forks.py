"""Whatever one process has opened is refused in its forked children, at once, and goes on in the parent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.errors import UsedAcrossFork
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.rocks import RocksStore
from strandline.followers.stores.state import MemoryStore
from strandline.followers.watch.api import Supervisor
from strandline.kv.log import LogKeyValue
from strandline.kv.memory import MemoryKeyValue
from strandline.log.memory import MemoryLog
from strandline.log.topic.logs import open_object_topic, open_wal_topic
from strandline.log.topic.memory import MemoryTopic
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.keyed import Update, Updates
from strandline.model.records import Op
from strandline.snapshots.artifacts import Artifacts
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.lease import Lease
from strandline.storage.objects.store import ABSENT
from strandline.storage.objects.urls import open_store
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import attach, tiering
from tests.contracts.logs import records
from tests.forking import in_a_child
from tests.matrix_cases import some

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

WRITER = WriterId(UUID(int=7))
STREAM = UUID(int=1)
START = Cursor(STREAM, 0)

Calls = dict[str, Callable[[], object]]


@dataclass
class Opened:
    """Something that is open: its central calls, how it is ended, and how its parent goes on with it."""

    calls: Calls
    goes_on: Callable[[], object]
    close: Callable[[], object] = lambda: None


Kind = Callable[[Path], contextlib.AbstractContextManager[Opened]]
KINDS: dict[str, Kind] = {}


def kind(open_it: Callable[[Path], Iterator[Opened]]) -> Callable[[Path], Iterator[Opened]]:
    KINDS[open_it.__name__] = contextlib.contextmanager(open_it)
    return open_it


def updates(number: int) -> Updates:
    since = Cursor(STREAM, number)
    return Updates.of([Update(Op.PUT, b"k%d" % number, b"v", number)], since)


def values(log: Any) -> list[bytes]:
    return [value for batch in log.read() for value in batch.column("value").to_pylist()]


def _store(store: Any) -> Opened:
    def goes_on() -> None:
        store.put("a", b"new")
        assert bytes(store.get("a").data) == b"new"
        assert [row.path for row in store.list("")] == ["a"]

    store.put("a", b"old")
    return Opened(
        {
            "get": lambda: store.get("a"),
            "get_range": lambda: store.get_range("a", 0, 1),
            "put": lambda: store.put("b", b""),
            "put_if": lambda: store.put_if("b", b"", ABSENT),
            "list": lambda: list(store.list("")),
            "delete": lambda: store.delete("a"),
        },
        goes_on,
    )


@kind
def local_store(folder: Path) -> Iterator[Opened]:
    yield _store(open_store(str(folder / "store")))


@kind
def store_in_memory(folder: Path) -> Iterator[Opened]:
    opened = _store(open_store(f"memory://forks{folder}"))
    opened.calls["open it again"] = lambda: open_store(f"memory://forks{folder}").get("a")
    yield opened


@kind
def lease(folder: Path) -> Iterator[Opened]:
    held = Lease(open_store(str(folder / "store")), "lease", "me")
    assert held.try_acquire()
    calls: Calls = {
        "ensure": held.ensure,
        "held": held.held,
        "renew": held.renew,
        "try_acquire": held.try_acquire,
        "read": held.read,
    }
    yield Opened(calls, held.renew, held.release)
    assert held.held()


def _log(log: Any) -> Opened:
    log.append(records(b"a"), writer=WRITER, number=0).result()

    def goes_on() -> None:
        log.append(records(b"b"), writer=WRITER, number=1).result()
        assert log.bounds().next == 2

    calls: Calls = {
        "append": lambda: log.append(records(b"x"), writer=WRITER, number=1),
        "bounds": log.bounds,
        "end": log.end,
        "plan": lambda: log.plan(Cursor(log.log_id, 0)),
        "wait": lambda: log.wait(Cursor(log.log_id, 0), 0.0),
        "create_slot": lambda: log.slots.create("one", 0),
        "claim_slot": lambda: log.slots.claim("one", "me"),
        "slots": log.slots.list,
    }
    return Opened(calls, goes_on)


@kind
def object_log(folder: Path) -> Iterator[Opened]:
    log = sl.open(str(folder / "log"), create=True)
    opened = _log(log)
    opened.calls["producer"] = log.producer
    opened.calls["read"] = lambda: list(log.read())
    opened.close = log.close
    yield opened


@kind
def log_in_memory(folder: Path) -> Iterator[Opened]:
    yield _log(MemoryLog())


@kind
def write_ahead_log(folder: Path) -> Iterator[Opened]:
    with sl.compat.WriteAheadLog.open(folder / "log") as wal:
        opened = _log(wal.log)
        wal.log.slots.create("held", 0)
        slot = wal.log.slots.claim("held", "me")
        iterators = [wal.log.read(), wal.log.read()]
        opened.calls |= {
            "current": lambda: wal.current,
            "oldest": lambda: wal.oldest,
            "read_since": lambda: wal.read_since(0),
            "wait of an lsn": lambda: wal.wait(0, 0.0),
            "read": lambda: list(wal.log.read()),
            "an iterator": lambda: next(iterators.pop()),
            "verify": wal.verify,
            "append of a value": lambda: wal.append(b"x"),
            "append_many": lambda: wal.append_many([b"x"]),
            "append_many of nothing": lambda: wal.append_many([]),
            "prune_through": lambda: wal.prune_through(1),
            "with": wal.__enter__,
            "floor": wal.log.slots.floor,
            "term": lambda: wal.log.term,
            "newest": lambda: wal.log.newest(0, 1),
            "state of a slot": slot.state,
            "advance of a slot": lambda: slot.advance(Cursor(wal.log.log_id, 1)),
        }
        opened.close = wal.close
        yield opened


@kind
def reader_of_a_write_ahead_log(folder: Path) -> Iterator[Opened]:
    with sl.compat.WriteAheadLog.open(folder / "log") as wal:
        wal.append(b"a")
        reader = sl.log.WalReader(folder / "log")
        calls: Calls = {
            "bounds": reader.bounds,
            "end": reader.end,
            "plan": lambda: reader.plan(Cursor(reader.log_id, 0)),
            "wait": lambda: reader.wait(Cursor(reader.log_id, 0), 0.0),
            "slots": lambda: list(reader.slots.list()),
            "floor": lambda: bool(reader.slots.floor()),
            "read": lambda: list(reader.read()),
            "term_at": lambda: reader.term_at(0),
        }
        yield Opened(calls, lambda: values(reader))


@kind
def tiered_log(folder: Path) -> Iterator[Opened]:
    attach(sl.open(str(folder / "log"), create=True), partitions=1)
    with sl.open(str(folder / "log")) as log:
        opened = _log(log)
        opened.close = log.close
        yield opened


def _producer(log: Any, read: Callable[[], list[bytes]], *, key: bytes | None) -> Iterator[Opened]:
    async def awaited(handle: Any) -> object:
        return await handle

    with log.producer(linger=3600) as producer:
        append, handle = producer.append, producer.append(key=key, value=b"queued")
        placed = producer.produce([b"placed"], b"m")
        whole = producer.append_batch(records(b"whole"))

        def goes_on() -> None:
            producer.append(key=key, value=b"next")
            producer.flush()
            assert handle.result().count == placed.result().count == whole.result().count == 1
            assert read() == [b"queued", b"placed", b"whole", b"next"]

        calls: Calls = {
            "append": lambda: producer.append(key=key, value=b"x"),
            "append, taken before the fork": lambda: append(key=key, value=b"x"),
            "a large append": lambda: append(key=key, value=b"x" * 100_000),
            "append_batch": lambda: producer.append_batch(records(b"x")),
            "produce": lambda: producer.produce([b"x"]),
            "flush": producer.flush,
            "retry": producer.retry,
            "flush_async": lambda: asyncio.run(producer.flush_async()),
            "the handle of a record": handle.result,
            "awaiting it": lambda: asyncio.run(awaited(handle)),
            "the handle of entries": placed.result,
            "the handle of a batch": whole.result,
            "with": producer.__enter__,
        }
        yield Opened(calls, goes_on, producer.close)


@kind
def producer(folder: Path) -> Iterator[Opened]:
    log = sl.open(str(folder / "log"), create=True)
    yield from _producer(log, lambda: values(log), key=b"k")


@kind
def producer_of_a_queue(folder: Path) -> Iterator[Opened]:
    log = open_queue(str(folder / "queue"))
    yield from _producer(log, lambda: values(log), key=None)


def _consumer(log: Any, **options: Any) -> Iterator[Opened]:
    with log.producer() as producer:
        for entry in (b"a", b"b"):
            producer.produce([entry])
            producer.flush()
    with sl.Consumer(log, **options) as consumer:
        first = consumer.next_batch()
        assert first is not None
        iterators = [consumer.batches(), consumer.batches()]

        def goes_on() -> None:
            consumer.ack(first.sequence)
            second = consumer.next_batch()
            assert second is not None
            assert second.values == [b"b"]
            consumer.ack_through(second.sequence)
            assert consumer.next_batch() is None

        calls: Calls = {
            "next_batch": consumer.next_batch,
            "batches": consumer.batches,
            "an iterator": lambda: next(iterators.pop()),
            "next_descriptors": lambda: consumer.next_descriptors(1),
            "ack": lambda: consumer.ack(first.sequence),
            "ack_through": lambda: consumer.ack_through(first.sequence),
            "flush": consumer.flush,
            "len": lambda: len(consumer),
            "next_to_ack": lambda: consumer.next_to_ack,
        }
        yield Opened(calls, goes_on, consumer.close)
    with sl.Consumer(log, **options) as again:
        assert again.next_batch() is None


@kind
def consumer(folder: Path) -> Iterator[Opened]:
    yield from _consumer(sl.open(str(folder / "log"), create=True))


@kind
def consumer_of_a_queue(folder: Path) -> Iterator[Opened]:
    yield from _consumer(open_queue(str(folder / "queue")))


def _topic(topic: Any) -> Iterator[Opened]:
    with contextlib.closing(topic):
        topic.publish(0, b"first")
        stream, assignment = topic.subscribe([(0, 0)])
        assert [message.payload for message in stream.take(10)] == [b"first"]

        def goes_on() -> None:
            assert topic.publish(0, b"second") == 1
            assert topic.publish_all(0, [b"third", b"fourth"]) == [2, 3]
            given: list[bytes] = []
            while len(given) < 3:
                given += [message.payload for message in stream.take(10)]
            assert given == [b"second", b"third", b"fourth"]

        calls: Calls = {
            "publish": lambda: topic.publish(0, b"x"),
            "publish_all": lambda: topic.publish_all(0, [b"x", b"y"]),
            "bounds": lambda: topic.bounds(0),
            "subscribe": topic.subscribe,
            "take": lambda: stream.take(60),
            "add": lambda: assignment.add(0, 0),
        }

        def close() -> None:
            stream.close()
            topic.close()

        yield Opened(calls, goes_on, close)


@kind
def object_topic(folder: Path) -> Iterator[Opened]:
    yield from _topic(open_object_topic(str(folder / "topic"), 1))


@kind
def wal_topic(folder: Path) -> Iterator[Opened]:
    yield from _topic(open_wal_topic(str(folder / "topic"), 1))


@kind
def topic_in_memory(folder: Path) -> Iterator[Opened]:
    yield from _topic(MemoryTopic(1))


def _fold(store: Any) -> Iterator[Opened]:
    with store:
        store.apply(updates(0), since=START, upto=Cursor(STREAM, 1))

        def goes_on() -> None:
            store.apply(updates(1), since=Cursor(STREAM, 1), upto=Cursor(STREAM, 2))
            assert dict(store.range()) == {b"k0": b"v", b"k1": b"v"}

        calls: Calls = {
            "apply": lambda: store.apply(updates(1), since=Cursor(STREAM, 1), upto=Cursor(STREAM, 2)),
            "get": lambda: store.get(b"k0"),
            "range": lambda: list(store.range()),
            "position": store.position,
            "cursor": lambda: store.cursor(STREAM),
            "begin_resync": lambda: store.begin_resync(STREAM),
            "export_to": lambda: store.export_to("nowhere"),
        }
        yield Opened(calls, goes_on, store.close)


@kind
def append_log_store(folder: Path) -> Iterator[Opened]:
    yield from _fold(AppendLogStore.open(str(folder / "fold")))
    with AppendLogStore.open(str(folder / "fold")) as again:
        assert again.position().cursor == Cursor(STREAM, 2)


@kind
def rocks_store(folder: Path) -> Iterator[Opened]:
    pytest.importorskip("rocksdict")
    yield from _fold(RocksStore.open(str(folder / "fold")))
    with RocksStore.open(str(folder / "fold")) as again:
        assert again.position().cursor == Cursor(STREAM, 2)


@kind
def fold_in_memory(folder: Path) -> Iterator[Opened]:
    yield from _fold(MemoryStore())


def _kv(kv: Any) -> Iterator[Opened]:
    version = kv.put("a", b"1")
    with kv.watch() as watch:

        def goes_on() -> None:
            kv.update("a", b"2", version)
            assert kv.get("a") == b"2"
            assert next(iter(watch.take(10, 10))).key == b"a"

        calls: Calls = {
            "put": lambda: kv.put("b", b"1"),
            "create": lambda: kv.create("b", b"1"),
            "update": lambda: kv.update("a", b"3", version),
            "delete": lambda: kv.delete("a"),
            "get": lambda: kv.get("a"),
            "scan": lambda: list(kv.scan()),
            "watch": kv.watch,
            "take": lambda: watch.take(10, 60),
        }
        yield Opened(calls, goes_on, watch.close)


@kind
def bucket_in_a_log(folder: Path) -> Iterator[Opened]:
    yield from _kv(LogKeyValue(sl.open(str(folder / "log"), create=True)))


@kind
def bucket_in_memory(folder: Path) -> Iterator[Opened]:
    yield from _kv(MemoryKeyValue())


@kind
def supervisor(folder: Path) -> Iterator[Opened]:
    kv, seen = MemoryKeyValue(), []
    with Supervisor(kv, seen.extend) as running:

        def goes_on() -> None:
            kv.put("a", b"1")
            assert running.wait_until(lambda state: state.cursor is not None and state.cursor.next == 1, 120)
            assert len(seen) == 1

        calls: Calls = {
            "run": running.run,
            "start": running.start,
            "state": running.state,
            "wait_until": lambda: running.wait_until(lambda _: False),
        }
        yield Opened(calls, goes_on, running.close)


@kind
def metadata_manager(folder: Path) -> Iterator[Opened]:
    with MetadataManager.start(MemoryTopic(1), snapshot_dir=folder / "snapshots") as manager:
        manager.reconcile_assignment([0])

        def goes_on() -> None:
            manager.publish_all([])
            assert manager.assigned_partitions() == [0]

        calls: Calls = {
            "reconcile_assignment": lambda: manager.reconcile_assignment([]),
            "assigned_partitions": manager.assigned_partitions,
            "committed_offset": lambda: manager.committed_offset(0),
            "publish_all": lambda: manager.publish_all([]),
        }
        yield Opened(calls, goes_on, manager.close)


@kind
def tierer(folder: Path) -> Iterator[Opened]:
    log = sl.open(str(folder / "log"), create=True)
    attach(log, partitions=1)
    with log.producer() as producing:
        producing.append(value=b"a")
    with tiering(log) as running:

        def goes_on() -> None:
            assert running.run_once(everything=True).copied

        stop = threading.Event()
        yield Opened({"run_once": running.run_once, "run": lambda: running.run(stop)}, goes_on)


@kind
def artifacts(folder: Path) -> Iterator[Opened]:
    published = Artifacts(str(folder / "store"), "snapshots")
    with AppendLogStore.open(str(folder / "fold")) as store:
        store.apply(updates(0), since=START, upto=Cursor(STREAM, 1))

        def goes_on() -> None:
            published.export(store, scratch=str(folder / "scratch"))
            assert published.newest() is not None

        calls: Calls = {
            "newest": published.newest,
            "lease": lambda: published.lease("me"),
            "export": lambda: published.export(store, scratch=str(folder / "scratch")),
            "trim": published.trim,
        }
        yield Opened(calls, goes_on)


@kind
def primary_and_replica(folder: Path) -> Iterator[Opened]:
    with (
        sl.node.Primary.open(folder / "a", name="a") as primary,
        sl.node.Replica.open(folder / "b", primary.url, name="b") as replica,
        sl.node.RemoteLog(primary.url) as remote,
    ):
        first = primary.append_values([b"one"])

        def goes_on() -> None:
            commit = remote.append(pa.Table.from_batches([records(b"two")]))
            assert first.bookmark.next == 1
            assert values(replica.reading(after=commit.bookmark, timeout=30)) == [b"one", b"two"]

        calls: Calls = {
            "append_values": lambda: primary.append_values([b"x"]),
            "condition": lambda: primary.condition,
            "reading of a replica": lambda: replica.reading(after=first.bookmark, timeout=30),
            "condition of a replica": lambda: replica.condition,
            "append to a remote log": lambda: remote.append(records(b"x")),
            "status of a remote log": remote.status,
            "read of a remote log": lambda: list(remote.read()),
        }

        def close() -> None:
            remote.close()
            replica.close()
            primary.close()

        yield Opened(calls, goes_on, close)


@pytest.mark.parametrize("name", some(KINDS, 10))
def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(name: str, tmp_path: Path) -> None:
    with KINDS[name](tmp_path) as opened:

        def use() -> dict[str, str]:
            answers: dict[str, str] = {}
            for turn in ("", " after closing"):
                for call, action in opened.calls.items():
                    try:
                        answers[call + turn] = f"returned {action()!r}"
                    except UsedAcrossFork:
                        pass
                    except BaseException as error:  # noqa: BLE001 - it is told
                        answers[call + turn] = repr(error)
                opened.close()
                gc.collect()
            return answers

        assert in_a_child(use) == "returned {}"
        opened.goes_on()


def test_garbage_of_the_parent_is_not_collected_in_a_child(tmp_path: Path) -> None:
    ended: list[int] = []

    class Native:
        def __del__(self) -> None:
            ended.append(os.getpid())

    def collect() -> list[int]:
        gc.collect()
        return ended

    log = sl.open(str(tmp_path / "log"), create=True)
    gc.disable()
    try:
        cycle = Native()
        cycle.itself = cycle
        del cycle
        assert in_a_child(collect) == "returned []"
    finally:
        gc.enable()
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:  # while another thread collects, collect() does nothing
        gc.collect()
        time.sleep(0.01)
    assert ended == [os.getpid()]
    assert log.bounds().next == 0


@pytest.mark.parametrize("name", ["producer", "consumer", "append_log_store", "object_topic", "bucket_in_a_log"])
def test_a_child_that_ends_in_good_order_does_not_harm_what_its_parent_has_open(name: str, tmp_path: Path) -> None:
    with KINDS[name](tmp_path) as opened:

        def end() -> None:
            opened.calls.clear()
            opened.close()
            gc.collect()

        assert in_a_child(end) == "returned None"
        opened.goes_on()


def test_a_child_is_refused_while_another_thread_of_its_parent_holds_the_locks_of_a_producer(tmp_path: Path) -> None:
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer(linger=3600) as producer:
        handle = producer.append(value=b"a")
        with producer._state.lock:

            def use() -> None:
                for call in (lambda: producer.append(value=b"x"), producer.flush, handle.result):
                    with pytest.raises(UsedAcrossFork, match=f"opened by the process {os.getppid()} "):
                        call()
                assert handle.done(), "who asks again and again would never end"
                producer.close()

            assert in_a_child(use) == "returned None"
        producer.flush()
        assert handle.result().first == 0


def test_appends_that_were_durable_before_the_fork_are_known_in_the_child(tmp_path: Path) -> None:
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        handle = producer.append(value=b"a")
        assert handle.result().first == 0
        assert in_a_child(lambda: handle.result().first) == "returned 0"


def test_an_iterator_that_reads_ahead_does_not_wait_for_the_threads_of_its_parent(tmp_path: Path) -> None:
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        for number in range(12):
            producer.append(value=b"%d" % number)
            producer.flush()
    batches = log.read()
    next(batches)
    next(batches)
    assert in_a_child(lambda: list(batches)).startswith("UsedAcrossFork")
    assert len(list(batches)) == 10


@bound_to_process(keep=("name",))
class Thing:
    """Something that is bound to its process."""

    def __init__(self) -> None:
        self.ended = 0
        self._origin = Origin("The thing", self)

    @property
    def name(self) -> str:
        return "thing"

    @property
    def size(self) -> int:
        return 1

    def use(self) -> int:
        return self._inside()

    def _inside(self) -> int:
        return 2

    def close(self) -> None:
        self.ended += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_ends_are_silent_constants_are_kept_and_all_else_is_refused_in_children_of_children_too() -> None:
    thing = Thing()
    use_it = thing.use  # before the fork

    def use() -> str:
        refusals = 0
        for call in (use_it, thing.use, lambda: thing.size, thing.__enter__):
            try:
                call()
            except UsedAcrossFork:
                refusals += 1
        thing.close()
        Thing.__exit__(thing)
        return f"{refusals} {thing.name} {isinstance(thing, Thing)} {thing.ended}"

    with thing:
        assert in_a_child(use) == "returned '4 thing True 0'"
        assert in_a_child(lambda: in_a_child(use)) == "returned \"returned '4 thing True 0'\""
    assert (thing.use(), thing.size, thing.ended) == (2, 1, 1)


def test_a_forked_child_may_use_what_it_opens_itself(tmp_path: Path) -> None:
    sl.open(str(tmp_path / "log"), create=True)

    def use() -> list[bytes]:
        log = sl.open(str(tmp_path / "log"))
        with log.producer() as producer:
            producer.append(value=b"from the child")
        return values(log)

    assert in_a_child(use) == "returned [b'from the child']"
