"""Topics on logs: stored records, shared batches, failures, and few reads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from strandline.errors import (
    ConsumerClosed,
    CorruptData,
    Fenced,
    InvalidInput,
    LogClosed,
    NotALog,
    StorageError,
    TransientStorageError,
    UnsupportedVersion,
)
from strandline.formats.topic import decode_topic, encode_topic
from strandline.log.memory import MemoryLog
from strandline.log.object import open_log
from strandline.log.topic.logs import LogTopic, open_object_topic, open_wal_topic
from strandline.log.topic.memory import MemoryTopic
from strandline.log.topic.publishers import BatchingPublisher
from strandline.log.topic.subscription import ReadSize
from strandline.log.wal.log import WalLog
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import together
from tests.contracts.logs import append, content, writer_named
from tests.contracts.topics import SOON, by_partition, collect

# --- on the disk ---------------------------------------------------------------------------------------------------


def test_published_messages_are_there_when_the_topic_is_opened_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "topic")
    with open_wal_topic(folder, 2) as topic:
        topic.publish(0, b"a")
        topic.publish_all(1, [b"b", b"c"])
    with open_wal_topic(folder, 2, create=False) as topic:
        assert [topic.bounds(partition) for partition in range(2)] == [Bounds(0, 1), Bounds(0, 2)]
        subscription, _ = topic.subscribe([(0, 0), (1, 1)])
        assert topic.publish(1, b"d") == 2
        assert by_partition(collect(subscription, 3)) == {0: [(0, b"a")], 1: [(1, b"c"), (2, b"d")]}


def test_a_topic_is_distinguished_from_another_one_in_its_place(tmp_path: Path) -> None:
    seen = []
    for folder in ("one", "one", "other"):
        with open_wal_topic(str(tmp_path / folder), 2) as topic:
            seen.append(topic.topic_id)
    assert seen[0] == seen[1] != seen[2]
    assert MemoryTopic(1).topic_id != MemoryTopic(1).topic_id


def test_a_folder_with_another_number_of_partitions_is_refused_naming_both(tmp_path: Path) -> None:
    open_wal_topic(str(tmp_path), 3).close()
    for create in (True, False):
        with pytest.raises(InvalidInput, match=r"has 3 partitions, but 5 were"):
            open_wal_topic(str(tmp_path), 5, create=create)
    open_wal_topic(str(tmp_path), 3).close()


def test_a_topic_is_created_only_if_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(NotALog, match="with create"):
        open_wal_topic(str(tmp_path / "topic"), 1, create=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotALog, match="with create"):
        open_object_topic(f"memory://topic-{uuid4().hex}", 1, create=False)


def test_a_creation_that_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    WalLog.open(str(tmp_path / "partition-00000")).close()
    with open_wal_topic(str(tmp_path), 2) as topic:
        assert topic.publish(1, b"x") == 0


def test_a_partition_that_is_missing_from_a_topic_is_not_created_again(tmp_path: Path) -> None:
    open_wal_topic(str(tmp_path), 2).close()
    DISK.remove_folder(str(tmp_path / "partition-00001"))
    with pytest.raises(NotALog, match="partition-00001"):
        open_wal_topic(str(tmp_path), 2)


def test_a_topic_that_is_open_is_refused_and_stays_open(tmp_path: Path) -> None:
    with open_wal_topic(str(tmp_path), 2) as topic:
        with pytest.raises(Fenced):
            open_wal_topic(str(tmp_path), 2)
        assert topic.publish(0, b"x") == 0
    open_wal_topic(str(tmp_path), 2).close()


def test_a_subscriber_of_a_topic_on_disk_is_woken_and_does_not_poll() -> None:
    clock, log = ManualClock(), Counting(MemoryLog())
    topic = LogTopic([log], polling=None, env=Env(clock=clock))
    subscription, _ = topic.subscribe([(0, 0)])
    for _ in range(10):
        assert subscription.take(60.0) == []
    assert log.plans == 1
    topic.publish(0, b"x")
    assert len(subscription.take(60.0)) == 1


# --- in a store ----------------------------------------------------------------------------------------------------


def test_a_place_with_another_number_of_partitions_is_refused_naming_both() -> None:
    url = f"memory://topic-{uuid4().hex}"
    open_object_topic(url, 2)
    with pytest.raises(InvalidInput, match=r"has 2 partitions, but 3 were"):
        open_object_topic(url, 3)


def test_nodes_that_create_a_topic_at_once_have_the_same_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/topic"
    opened: list[LogTopic] = []
    together(*[lambda: opened.append(open_object_topic(url, 2))] * 4)
    for turn, topic in enumerate(opened):
        assert topic.publish(1, b"x") == turn
    assert {log.log_id for topic in opened for log in topic.logs} == {log.log_id for log in opened[0].logs}


def test_of_nodes_that_create_it_with_different_numbers_one_decides(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/topic"

    def opens(count: int) -> int | str:
        try:
            return open_object_topic(url, count).partition_count
        except InvalidInput as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(opens, [1, 2]))
    (count,) = [found for found in outcomes if isinstance(found, int)]
    assert open_object_topic(url, count).partition_count == count


@pytest.fixture
def place() -> PlainStore:
    return PlainStore()


def on_a_line(place: PlainStore) -> tuple[LogTopic, FaultyStore]:
    """A topic of one partition on a store whose calls a test may let fail."""
    line, clock, chance = FaultyStore(place), ManualClock(), SeededChance(1)
    log = open_log(line, create=True, env=Env(clock=clock, chance=chance))
    return LogTopic([log], env=Env(clock=clock, chance=chance)), line


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("path_prefix", ["", "head", "batches"])
def test_a_lost_answer_doubles_nothing(place: PlainStore, lost: int, path_prefix: str) -> None:
    topic, line = on_a_line(place)
    topic.publish(0, b"a")
    line.lose_answers(lost, path_prefix=path_prefix)
    assert topic.publish(0, b"b") == 1
    line.fail_next("put_if", "put", path_prefix=path_prefix, times=lost)
    assert topic.publish_all(0, [b"c", b"d"]) == [2, 3]
    assert content(open_log(place)) == list(enumerate([b"a", b"b", b"c", b"d"]))


def test_a_failed_publish_raises_and_the_next_one_works(place: PlainStore) -> None:
    topic, line = on_a_line(place)
    topic.publish(0, b"a")
    with line.down(), pytest.raises(StorageError):
        topic.publish(0, b"b")
    assert topic.publish(0, b"c") == 1
    assert content(open_log(place)) == [(0, b"a"), (1, b"c")]


def test_a_message_of_unknown_outcome_is_stored_once_at_most(place: PlainStore) -> None:
    topic, line = on_a_line(place)
    topic.publish(0, b"a")
    line.lose_answers(1, path_prefix="head")
    line.hook(lambda call: line.turn_down() if (call.name, call.stage) == ("put_if", "after") else None)
    with pytest.raises(StorageError):
        topic.publish(0, b"b")
    line.unhook()
    line.heal()
    assert topic.publish(0, b"c") == 2
    assert content(open_log(place)) == list(enumerate([b"a", b"b", b"c"]))


def test_a_publisher_that_was_forgotten_continues_under_a_new_name(place: PlainStore) -> None:
    topic, _ = on_a_line(place)
    topic.publish(0, b"a")
    other = open_log(place)
    for name in range(MAX_WRITERS + 1):
        append(other, b"x", writer=writer_named(name), number=0)
    assert topic.publish(0, b"b") == MAX_WRITERS + 2
    assert topic.publish(0, b"c") == MAX_WRITERS + 3


def test_an_idle_follower_polls_four_times_a_second_however_short_its_turns_are() -> None:
    for turn in (60.0, 0.05):
        clock, log = ManualClock(), Counting(MemoryLog())
        topic = LogTopic([log], env=Env(clock=clock))
        subscription, _ = topic.subscribe([(0, 0)])
        began = clock.monotonic()
        while clock.monotonic() - began < 60.0:
            assert subscription.take(turn) == []
        assert log.plans <= 60 * 4 + 30
        append(log.log, b"x", number=0)
        began = clock.monotonic()
        assert len(subscription.take(60.0)) == 1
        assert clock.monotonic() - began <= 0.26


def test_where_something_came_after_a_long_wait_it_polls_often_again() -> None:
    clock, logs = ManualClock(), [MemoryLog(), MemoryLog()]
    subscription, _ = LogTopic(logs, env=Env(clock=clock)).subscribe([(0, 0), (1, 0)])
    assert subscription.take(60.0) == []
    append(logs[0], b"x", number=0)
    assert by_partition(subscription.take(60.0)) == {0: [(0, b"x")]}
    append(logs[1], b"y", number=0)
    began = clock.monotonic()
    assert by_partition(subscription.take(60.0)) == {1: [(0, b"y")]}
    assert clock.monotonic() - began <= 0.01


def test_without_a_timeout_it_polls_at_once() -> None:
    clock, log = ManualClock(), MemoryLog()
    subscription, _ = LogTopic([log], env=Env(clock=clock)).subscribe([(0, 0)])
    assert subscription.take(60.0) == []
    append(log, b"x", number=0)
    assert len(subscription.take(0.0)) == 1


# --- publishing together -------------------------------------------------------------------------------------------


class Counting:
    """A log that counts its calls and lets a test act between them."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.plans = self.appends = self.fetched = 0
        self.before_append = self.after_append = lambda: None
        self.before_plan = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self.log, name)

    def append(self, *args: object, **options: object) -> object:
        self.appends += 1
        self.before_append()
        handle = self.log.append(*args, **options)
        self.after_append()
        return handle

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[object]:
        self.plans += 1
        self.before_plan()
        spans = self.log.plan(since, limit)
        self.fetched += sum(span.size for span in spans)
        return spans


def test_messages_that_arrive_while_a_batch_is_sent_share_the_next_one() -> None:
    log = Counting(MemoryLog())
    publisher = BatchingPublisher(log, env=SYSTEM)
    topic = LogTopic([log], publishers=[publisher])

    under_way = threading.Event()

    def until_seven_wait() -> None:
        if log.appends == 1:
            under_way.set()
            with publisher._changed:
                while len(publisher._queue) < 7:
                    publisher._changed.wait(0.001)

    log.before_append = until_seven_wait
    offsets: dict[bytes, int] = {}

    def publish(name: int) -> None:
        if name:
            under_way.wait(120)  # before, it may share the first batch, and then nobody ever sees seven wait
        payload = b"%d" % name
        offsets[payload] = topic.publish_all(0, [payload, payload])[0]

    together(*[lambda name=name: publish(name) for name in range(8)])
    assert log.appends == 2
    found = content(log.log)
    assert sorted(offsets.values()) == list(range(0, 16, 2))
    for payload, offset in offsets.items():
        assert found[offset : offset + 2] == [(offset, payload), (offset + 1, payload)]


def test_a_batch_that_landed_though_its_append_failed_is_recognised_and_not_duplicated() -> None:
    log = Counting(MemoryLog())
    topic = LogTopic([log], env=Env(clock=ManualClock()))
    topic.publish(0, b"a")

    def fail() -> None:
        if log.appends < 4:
            raise TransientStorageError("the answer was lost")

    log.after_append = fail
    assert topic.publish_all(0, [b"b", b"c"]) == [1, 2]
    assert log.appends == 4
    assert topic.publish(0, b"d") == 3
    assert content(log.log) == list(enumerate([b"a", b"b", b"c", b"d"]))


def test_a_publisher_is_one_writer_however_often_it_publishes(place: PlainStore) -> None:
    topic, _ = on_a_line(place)
    for _ in range(5):
        topic.publish(0, b"x")
    assert len(open_log(place).head().writers) == 1


def test_an_invalid_message_fails_its_own_publisher_only() -> None:
    log = Counting(MemoryLog())
    topic = LogTopic([log])
    with pytest.raises(InvalidInput, match="bytes, not str"):
        topic.publish_all(0, [b"a", "b"])
    assert topic.bounds(0) == Bounds(0, 0)
    assert topic.publish(0, b"a") == 0


def test_a_failure_reaches_all_callers_that_shared_the_batch_and_none_hangs() -> None:
    log = Counting(MemoryLog())
    broken = threading.Event()
    broken.set()

    def fail() -> None:
        if broken.is_set():
            raise CorruptData("the log is broken")

    log.before_append = fail
    topic = LogTopic([log])

    def publish() -> None:
        with pytest.raises(CorruptData):
            topic.publish(0, b"x")

    together(*[publish] * 6)
    broken.clear()
    assert topic.publish(0, b"y") == 0


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_slow_subscriber_reads_the_log_in_bounded_pieces() -> None:
    log = Counting(MemoryLog())
    topic = LogTopic([log], pieces=ReadSize(bytes=1 << 20))
    for _ in range(40):
        topic.publish_all(0, [b"x" * 10_000] * 50)
    subscription, _ = topic.subscribe([(0, 0)])
    assert log.fetched == 0
    given = 0
    while given < 2000:
        messages = subscription.take(SOON)
        given += len(messages)
        assert sum(len(message.payload) for message in messages) <= 9 << 20
        assert log.fetched <= given * 10_000 + (2 << 20)


def test_a_large_batch_is_read_once_and_given_in_parts() -> None:
    log = Counting(MemoryLog())
    topic = LogTopic([log])
    topic.publish_all(0, [b"%d" % number for number in range(20_000)])
    subscription, _ = topic.subscribe([(0, 5)])
    sizes, messages = [], []
    while len(messages) < 19_995:
        taken = subscription.take(SOON)
        sizes.append(len(taken))
        messages += taken
    assert [message.payload for message in messages] == [b"%d" % number for number in range(5, 20_000)]
    assert max(sizes) <= 4096
    assert log.plans == 1


@pytest.mark.parametrize("make", [MemoryTopic, lambda count: LogTopic([MemoryLog() for _ in range(count)])])
def test_a_busy_partition_does_not_starve_the_others(make: type[MemoryTopic]) -> None:
    topic = make(2)
    subscription, _ = topic.subscribe([(0, 0), (1, 0)])
    topic.publish_all(0, [b"x"] * 20_000)
    topic.publish(1, b"y")
    taken = subscription.take(SOON) + subscription.take(SOON)
    assert [message.partition for message in taken].count(1) == 1


def test_a_partition_that_cannot_be_read_raises_and_loses_nothing_of_it_or_of_others() -> None:
    logs = [Counting(MemoryLog()) for _ in range(3)]
    topic = LogTopic(logs)
    for partition in range(3):
        topic.publish_all(partition, [b"x", b"y"])

    def fail() -> None:
        raise TransientStorageError("the line is cut")

    logs[1].before_plan = fail
    subscription, assignment = topic.subscribe([(partition, 0) for partition in range(3)])
    messages, failures = [], 0
    for _ in range(6):
        try:
            messages += subscription.take(0.0)
        except TransientStorageError:
            failures += 1
    assert failures
    assert by_partition(messages) == {partition: [(0, b"x"), (1, b"y")] for partition in (0, 2)}
    assert assignment.partitions() == [0, 1, 2]
    logs[1].before_plan = lambda: None
    assert by_partition(collect(subscription, 2)) == {1: [(0, b"x"), (1, b"y")]}


def test_a_partition_that_is_removed_and_added_while_it_is_read_begins_where_it_was_added() -> None:
    log = Counting(MemoryLog())
    topic = LogTopic([log])
    topic.publish_all(0, [b"a", b"b", b"c"])
    subscription, assignment = topic.subscribe([(0, 0)])

    def replace() -> None:
        log.before_plan = lambda: None
        assignment.remove(0)
        assignment.add(0, 1)

    log.before_plan = replace
    first = subscription.take(SOON)
    assert [message.offset for message in first] == [0, 1, 2]  # that take had begun before
    assert [message.offset for message in subscription.take(SOON)] == [1, 2]


# --- ending --------------------------------------------------------------------------------------------------------


def test_a_subscription_that_could_not_begin_leaves_nothing() -> None:
    for topic in (MemoryTopic(1), LogTopic([MemoryLog()])):
        with pytest.raises(InvalidInput):
            topic.subscribe([(0, 0), (1, 0)])
        assert not topic._subscriptions


def test_a_closed_object_raises(tmp_path: Path) -> None:
    for topic in (MemoryTopic(1), LogTopic([MemoryLog()]), open_wal_topic(str(tmp_path), 1)):
        subscription, assignment = topic.subscribe([(0, 0)])
        subscription.close()
        with pytest.raises(ConsumerClosed):
            assignment.add(0, 0)
        topic.close()
        with pytest.raises(LogClosed):
            topic.publish(0, b"x")
        with pytest.raises(LogClosed):
            topic.subscribe()


def test_a_memory_topic_cannot_be_trimmed_past_its_end() -> None:
    topic = MemoryTopic(1)
    topic.publish(0, b"x")
    with pytest.raises(InvalidInput, match="ends at offset 1"):
        topic.trim(0, 2)
    topic.trim(0, 1)
    topic.trim(0, 0)
    assert topic.bounds(0) == Bounds(1, 1)


# --- topic.json ----------------------------------------------------------------------------------------------------


def test_the_number_of_partitions_is_read_back_as_it_was_written() -> None:
    assert [decode_topic(encode_topic(count), "topic.json") for count in (1, 50)] == [1, 50]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        encode_topic(0),
        encode_topic(3).replace(b"3", b"true"),
        encode_topic(3).replace(b"strandline-topic", b"strandline-wal"),
        encode_topic(3).replace(b'"min_reader": 1', b'"min_reader": "1"'),
    ],
)
def test_damage_is_reported_with_its_place(data: bytes) -> None:
    with pytest.raises(CorruptData, match=r"here/topic\.json"):
        decode_topic(data, "here/topic.json")


def test_a_topic_of_a_newer_version_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        decode_topic(encode_topic(3).replace(b'"min_reader": 1', b'"min_reader": 2'), "topic.json")
