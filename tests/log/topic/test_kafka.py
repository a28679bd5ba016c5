"""Kafka topics: the suite on the client library's mock cluster and on a real broker, and what only Kafka does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from uuid import uuid4

import pytest

from strandline.errors import (
    CursorExpired,
    Diverged,
    Gap,
    InvalidInput,
    LogClosed,
    MissingExtra,
    NotFound,
    StorageError,
    StrandlineError,
    TransientStorageError,
    UsedAcrossFork,
)
from strandline.log.topic.contract import NO_TOPIC, Message, Topic
from strandline.log.topic.kafka import KafkaTopic
from strandline.log.topic.kafka_client import refusal
from strandline.log.topic.kafka_stream import Track, resume
from strandline.model.cursor import Bounds
from strandline.storage.clock import CLOCK
from strandline.testing.stores import together
from tests.contracts.topics import SOON, RetentionContract, TopicContract, by_partition, collect, numbered
from tests.servers import KafkaServer, free_port, started

kafka = pytest.importorskip("confluent_kafka")
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType  # noqa: E402

from tests.forking import in_a_child  # noqa: E402
from tests.log.topic.mock_kafka import LIST_OFFSETS, PRODUCE, MockCluster  # noqa: E402


def fresh() -> str:
    return f"topic-{uuid4().hex[:12]}"


def forget(bootstrap: str, name: str, partition: int, upto: int) -> None:
    """Delete the records below an offset, as retention does."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_records([kafka.TopicPartition(name, partition, upto)])[
        kafka.TopicPartition(name, partition, upto)
    ].result(SOON)


def eventually(call: Callable[[], Any]) -> Any:
    """The result of a call, which is repeated while it fails in passing."""
    deadline = CLOCK.monotonic() + SOON
    while True:
        try:
            return call()
        except (TransientStorageError, kafka.KafkaException):
            if CLOCK.monotonic() > deadline:
                raise


class Ahead:
    """Topics of three partitions, created ahead of use: the client's first publish waits half a second."""

    def __init__(self, make: Callable[[int], KafkaTopic]) -> None:
        self.make = make
        self._made: list[KafkaTopic] = []

    def topic(self, partition_count: int) -> KafkaTopic:
        if partition_count != 3:
            return self.make(partition_count)
        while len(self._made) < 4:
            self._made.append(self.make(3))
            self._made[-1].publish_all(0, [])
        return self._made.pop(0)

    def close(self) -> None:
        for topic in self._made:
            topic.close()


@pytest.fixture(scope="module")
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def on_mock(mock: MockCluster) -> Iterator[Ahead]:
    def make(partition_count: int) -> KafkaTopic:
        name = fresh()
        if partition_count > 0:
            mock.create(name, partition_count)
        return KafkaTopic(mock.bootstrap, name, partition_count, create=False)

    topics = Ahead(make)
    yield topics
    topics.close()


@pytest.fixture(scope="module")
def on_broker(kafka_server: KafkaServer) -> Iterator[Ahead]:
    def make(partition_count: int) -> KafkaTopic:
        # On a busy machine a broker that has just started may take longer to find its controller than a call waits.
        return cast("KafkaTopic", eventually(lambda: KafkaTopic(kafka_server.bootstrap, fresh(), partition_count)))

    topics = Ahead(make)
    yield topics
    topics.close()


@pytest.fixture
def topic(on_mock: Ahead) -> Iterator[KafkaTopic]:
    with on_mock.topic(3) as topic:
        yield topic


@pytest.mark.matrix
class TestOnTheMockCluster(TopicContract):
    publishes = 12

    @pytest.fixture(autouse=True)
    def _topics(self, on_mock: Ahead) -> None:
        self.make_topic = on_mock.topic

    def make_topic(self, partition_count: int) -> Topic:
        raise NotImplementedError


class TestOnARealBroker(RetentionContract):
    publishes = 12

    @pytest.fixture(autouse=True)
    def _topics(self, on_broker: Ahead) -> None:
        self.make_topic = on_broker.topic

    def make_topic(self, partition_count: int) -> Topic:
        raise NotImplementedError

    def trim(self, topic: Topic, partition: int, upto: int) -> None:
        assert isinstance(topic, KafkaTopic)
        forget(topic._bootstrap, topic._name, partition, upto)

    def test_one_whose_next_message_was_deleted_expires_and_the_others_continue(self, topic: Topic) -> None:
        """More than is fetched ahead, which is delivered though it was deleted meanwhile."""
        assert isinstance(topic, KafkaTopic)
        sparing = {"queued.max.messages.kbytes": 1, "queued.min.messages": 1, "fetch.message.max.bytes": 1000}
        with KafkaTopic(topic._bootstrap, topic._name, 3, config=sparing) as small:
            subscription, assignment = small.subscribe([(0, 0), (1, 0)])
            for _ in range(40):
                topic.publish(0, bytes(20_000))
            topic.publish(1, b"m0")
            forget(topic._bootstrap, topic._name, 0, 35)
            messages: list[Message] = []

            def take_on() -> None:
                while True:
                    messages.extend(subscription.take(SOON))

            with pytest.raises(CursorExpired, match=r"artition 0\b.* 35\b"):
                take_on()
            assert assignment.partitions() == [1]
            assert len(messages) < 36
            found = [message.offset for message in messages if message.partition == 0]
            assert found == list(range(len(found)))
            topic.publish(1, b"m1")
            given = [message for message in messages if message.partition == 1]
            assert by_partition([*given, *collect(subscription, 2 - len(given))]) == {1: numbered(0, 2)}
            assignment.add(0, 35)
            assert [message.offset for message in collect(subscription, 5)] == list(range(35, 40))


# --- what is decided ----------------------------------------------------------------------------------------------


def test_what_is_retained_is_resumed_and_what_is_past_the_end_is_waited_for_there() -> None:
    assert resume(0, Track(next=4, end=9), Bounds(4, 9)) == 4
    assert resume(0, Track(next=9, end=9), Bounds(4, 12)) == 9
    assert resume(0, Track(next=30, end=9), Bounds(4, 12)) == 12


def test_a_deleted_offset_has_expired_and_an_end_that_went_back_has_diverged() -> None:
    assert isinstance(resume(0, Track(next=3, end=9), Bounds(4, 9)), CursorExpired)
    assert isinstance(resume(0, Track(next=9, end=9), Bounds(0, 8)), Diverged)
    assert isinstance(resume(0, Track(next=30, end=9), Bounds(0, 8)), Diverged)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (kafka.KafkaError._ALL_BROKERS_DOWN, TransientStorageError),
        (kafka.KafkaError._MSG_TIMED_OUT, TransientStorageError),
        (kafka.KafkaError.NOT_ENOUGH_REPLICAS, TransientStorageError),
        (kafka.KafkaError.UNKNOWN_TOPIC_OR_PART, NotFound),
        (kafka.KafkaError.MSG_SIZE_TOO_LARGE, InvalidInput),
        (kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED, StorageError),
        (kafka.KafkaError.POLICY_VIOLATION, StorageError),
    ],
)
def test_errors_of_kafka_are_errors_of_the_tree(code: int, kind: type[StrandlineError]) -> None:
    reason = refusal(kafka.KafkaError(code), "Publishing to partition 3 of topic events")
    assert type(reason) is kind
    assert "partition 3 of topic events" in str(reason)


def test_a_fatal_error_asks_to_open_the_topic_again() -> None:
    error = kafka.KafkaError(kafka.KafkaError._ALL_BROKERS_DOWN, "over", True)
    assert type(refusal(error, "Publishing")) is StorageError
    assert "open the topic again" in str(refusal(error, "Publishing"))


# --- opening ------------------------------------------------------------------------------------------------------


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra, match=r"strandline\[kafka\]"):
        KafkaTopic("127.0.0.1:1", "events", 1)


@pytest.mark.parametrize("setting", ["acks", "enable.idempotence", "enable.auto.commit", "auto.offset.reset"])
def test_settings_that_guarantees_depend_on_cannot_be_configured(setting: str) -> None:
    with pytest.raises(InvalidInput, match=setting):
        KafkaTopic("127.0.0.1:1", "events", 1, config={setting: "0"})


def test_a_configuration_that_the_library_refuses_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"no\.such\.thing"):
        KafkaTopic("127.0.0.1:1", "events", 1, config={"no.such.thing": "1"})


def test_a_topic_of_another_count_is_refused_naming_both(mock: MockCluster) -> None:
    name = fresh()
    mock.create(name, 3)
    with pytest.raises(InvalidInput, match=r"has 3 partitions and 5 are configured"):
        KafkaTopic(mock.bootstrap, name, 5)


def test_a_missing_broker_is_reported_in_time() -> None:
    with pytest.raises(TransientStorageError, match=r"check that the broker runs"):
        KafkaTopic(f"127.0.0.1:{free_port()}", "events", 1, timeout=0.3)


def test_a_missing_topic_is_not_made_by_looking_for_it(kafka_server: KafkaServer) -> None:
    name = fresh()
    with pytest.raises(NotFound, match=name):
        KafkaTopic(kafka_server.bootstrap, name, 1, create=False)
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    assert name not in admin.list_topics(timeout=SOON).topics


def test_a_topic_is_made_so_that_nothing_is_dropped_by_age_or_key(kafka_server: KafkaServer) -> None:
    name = fresh()
    KafkaTopic(kafka_server.bootstrap, name, 2, replication_factor=1).close()
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    resource = ConfigResource(ResourceType.TOPIC, name)
    config = admin.describe_configs([resource])[resource].result(SOON)
    assert config["cleanup.policy"].value == "delete"
    assert config["retention.ms"].value == "-1"
    assert len(admin.list_topics(name, timeout=SOON).topics[name].partitions) == 2


def test_an_existing_topic_is_opened_unchanged_and_only_with_its_count(kafka_server: KafkaServer) -> None:
    name = fresh()
    with KafkaTopic(kafka_server.bootstrap, name, 2) as first:
        first.publish(1, b"kept")
        with KafkaTopic(kafka_server.bootstrap, name, 2) as second:
            assert second.bounds(1) == Bounds(0, 1)
    with pytest.raises(InvalidInput, match=r"has 2 partitions and 3 are configured"):
        KafkaTopic(kafka_server.bootstrap, name, 3)


def test_nodes_that_create_a_topic_at_once_all_have_it(kafka_server: KafkaServer) -> None:
    name, topics = fresh(), []
    together(*[lambda: topics.append(KafkaTopic(kafka_server.bootstrap, name, 2)) for _ in range(4)])
    assert len(topics) == 4
    for topic in topics:
        topic.close()


# --- publishing ---------------------------------------------------------------------------------------------------


def test_errors_that_pass_are_tried_again_and_nothing_is_appended_twice(mock: MockCluster, topic: KafkaTopic) -> None:
    errors = kafka.KafkaError
    mock.fail(PRODUCE, errors.NOT_LEADER_FOR_PARTITION, errors.REQUEST_TIMED_OUT, errors.NOT_ENOUGH_REPLICAS)
    assert topic.publish_all(0, [b"a", b"b"]) == [0, 1]
    mock.fail(LIST_OFFSETS, errors.NOT_LEADER_FOR_PARTITION, errors.LEADER_NOT_AVAILABLE)
    assert topic.bounds(0) == Bounds(0, 2)
    subscription, _ = topic.subscribe([(0, 0)])
    assert collect(subscription, 2) == [Message(0, 0, b"a"), Message(0, 1, b"b")]


def test_a_publish_that_the_broker_refuses_is_an_error_and_the_next_one_continues(
    mock: MockCluster, topic: KafkaTopic
) -> None:
    assert topic.publish(0, b"a") == 0
    mock.fail(PRODUCE, kafka.KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(InvalidInput, match=r"partition 0 .* publish smaller messages"):
        topic.publish(0, b"b")
    assert topic.publish(0, b"c") == 1


def test_a_message_too_large_for_the_configuration_lets_none_of_its_companions_through(topic: KafkaTopic) -> None:
    with pytest.raises(InvalidInput, match="1000001 bytes"):
        topic.publish_all(0, [b"a", bytes(1_000_001)])
    assert topic.bounds(0) == Bounds(0, 0)


@pytest.mark.matrix
def test_while_the_broker_is_away_a_publish_gives_up_in_time_and_lands_no_more() -> None:
    with MockCluster() as cluster:
        cluster.create("events", 1)
        with KafkaTopic(cluster.bootstrap, "events", 1) as patient:
            assert patient.publish(0, b"before") == 0  # the first one takes a second, and more on a busy machine
        with KafkaTopic(cluster.bootstrap, "events", 1, timeout=3.0) as topic:
            subscription, _ = topic.subscribe([(0, 0)])
            assert collect(subscription, 1) == [Message(0, 0, b"before")]
            cluster.down()
            with pytest.raises(TransientStorageError, match="partition 0 of topic events"):
                topic.publish(0, b"given up")
            with pytest.raises(TransientStorageError, match="bounds of partition 0"):
                topic.bounds(0)
            assert subscription.take(0.0) == []
            cluster.up()
            assert eventually(lambda: topic.publish(0, b"after")) == 1
            assert collect(subscription, 1) == [Message(0, 1, b"after")]


def test_more_than_the_client_takes_at_once_waits_for_room(mock: MockCluster) -> None:
    name = fresh()
    mock.create(name, 1)
    with KafkaTopic(mock.bootstrap, name, 1, create=False, config={"queue.buffering.max.messages": 10}) as topic:
        assert topic.publish_all(0, [b"x"] * 100) == list(range(100))


def test_closing_lets_what_is_being_published_arrive(mock: MockCluster, on_mock: Ahead) -> None:
    topic = on_mock.topic(3)
    flowing = threading.Event()

    def publish() -> int:
        count = 0
        while True:
            try:
                count += len(topic.publish_all(0, [b"x"] * 500))
            except LogClosed:
                return count
            flowing.set()

    with ThreadPoolExecutor(2) as pool:
        publishing = [pool.submit(publish) for _ in range(2)]
        assert flowing.wait(SOON)
        topic.close()
        published = sum(done.result(SOON) for done in publishing)
    with KafkaTopic(mock.bootstrap, topic._name, 3, create=False) as again:
        assert again.bounds(0) == Bounds(0, published)
    with pytest.raises(LogClosed):
        topic.bounds(0)


def test_a_topic_of_another_process_is_refused(topic: KafkaTopic) -> None:
    stream, _ = topic.subscribe([(0, 0)])

    def use() -> None:
        for call in (lambda: topic.publish(0, b"x"), lambda: topic.bounds(0), topic.subscribe, lambda: stream.take(60)):
            with pytest.raises(UsedAcrossFork, match="open it again there"):
                call()
        stream.close()
        topic.close()

    assert in_a_child(use) == "returned None"
    assert topic.publish(0, b"x") == 0


# --- following ----------------------------------------------------------------------------------------------------


class Meddling:
    """The library's consumer, with a hook between its answer and the use of that answer."""

    def __init__(self, consumer: Any, meddle: Callable[[], None]) -> None:
        self._consumer = consumer
        self._meddle: Callable[[], None] | None = meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, count: int, timeout: float) -> list[Any]:
        found = self._consumer.consume(count, timeout)
        meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()
        return found


@pytest.mark.parametrize("start", [0, 2, 4, 9])
def test_messages_fetched_for_an_earlier_assignment_are_neither_delivered_twice_nor_taken_for_a_gap(
    topic: KafkaTopic, start: int
) -> None:
    topic.publish_all(0, [payload for _, payload in numbered(0, 10)])
    subscription, assignment = topic.subscribe([(0, 3)])

    def meddle() -> None:
        assignment.remove(0)
        assignment.add(0, start)

    subscription._consumer = Meddling(subscription._consumer, meddle)
    assert by_partition(collect(subscription, 10 - start)) == {0: numbered(start, 10)}
    topic.publish(0, b"m10")
    assert by_partition(collect(subscription, 1)) == {0: numbered(10, 11)}


def test_a_partition_removed_while_it_was_fetched_gives_nothing(topic: KafkaTopic) -> None:
    topic.publish(0, b"m0")
    subscription, assignment = topic.subscribe([(0, 0)])
    subscription._consumer = Meddling(subscription._consumer, lambda: assignment.remove(0))
    topic.publish(1, b"m0")
    assignment.add(1, 0)
    assert by_partition(collect(subscription, 1)) == {1: numbered(0, 1)}


def marked(topic: KafkaTopic) -> Bounds:
    bounds = topic.bounds(0)
    if bounds.next < 2:
        raise TransientStorageError("The mark is written a moment after the commit was answered.")
    return bounds


def test_a_gap_in_one_partition_is_reported_and_the_others_continue(
    kafka_server: KafkaServer, on_broker: Ahead
) -> None:
    """Transactions leave one: the mark of their end takes an offset."""
    with on_broker.topic(3) as topic:
        foreign = kafka.Producer({"bootstrap.servers": kafka_server.bootstrap, "transactional.id": fresh()})
        foreign.init_transactions(SOON)
        foreign.begin_transaction()
        foreign.produce(topic._name, b"m0", partition=0)
        foreign.commit_transaction(SOON)
        assert eventually(lambda: marked(topic)) == Bounds(0, 2)
        assert topic.publish(0, b"m2") == 2
        topic.publish(1, b"m0")
        subscription, assignment = topic.subscribe([(0, 0), (1, 0)])
        messages: list[Message] = []

        def take_on() -> None:
            while True:
                messages.extend(subscription.take(SOON))

        with pytest.raises(Gap, match=r"Partition 0 .* has no offset 1: 2 comes"):
            take_on()
        assert assignment.partitions() == [1]
        messages += collect(subscription, 2 - len(messages))
        assert by_partition(messages) == {0: numbered(0, 1), 1: numbered(0, 1)}
        assignment.add(0, 2)
        assert collect(subscription, 1) == [Message(0, 2, b"m2")]


def test_no_position_is_stored_in_kafka(kafka_server: KafkaServer, on_broker: Ahead) -> None:
    with on_broker.topic(3) as topic:
        topic.publish(0, b"m0")
        subscription, _ = topic.subscribe([(0, 0)])
        collect(subscription, 1)
        subscription.close()
        settings = {"bootstrap.servers": kafka_server.bootstrap, "group.id": "strandline"}
        reader = kafka.Consumer(settings)
        [place] = reader.committed([kafka.TopicPartition(topic._name, 0)], timeout=SOON)
        reader.close()
        assert place.offset < 0


def test_a_topic_created_again_is_not_taken_for_the_old_one(kafka_server: KafkaServer, on_broker: Ahead) -> None:
    with on_broker.topic(3) as topic:
        topic.publish_all(0, [b"x"] * 5)
        before = topic.topic_id
        subscription, assignment = topic.subscribe([(0, 0)])
        collect(subscription, 5)
        admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
        admin.delete_topics([topic._name])[topic._name].result(SOON)
        eventually(lambda: admin.create_topics([NewTopic(topic._name, 3, 1)])[topic._name].result(SOON))

        def take_on() -> None:
            while True:
                assert subscription.take(SOON) == []

        with pytest.raises(Diverged, match=r"had reached 5"):
            take_on()
        assert assignment.partitions() == []
        with KafkaTopic(kafka_server.bootstrap, topic._name, 3) as anew:
            assert NO_TOPIC not in {before, anew.topic_id}
            assert anew.topic_id != before


@pytest.mark.slow
def test_a_broker_that_is_killed_and_started_again_loses_nothing_and_doubles_nothing() -> None:
    server = KafkaServer()
    server.session_seconds = 2.0
    with started(server), KafkaTopic(server.bootstrap, "events", 2, timeout=60.0) as topic:
        subscription, _ = topic.subscribe([(0, 0), (1, 0)])
        published: dict[int, dict[int, bytes]] = {0: {}, 1: {}}
        enough, flowing = threading.Event(), threading.Event()

        def publish(partition: int) -> None:
            count = 0
            while not enough.is_set():
                payloads = [b"%d" % (count + index) for index in range(20)]
                published[partition].update(zip(topic.publish_all(partition, payloads), payloads, strict=True))
                count += 20
                flowing.set()

        with ThreadPoolExecutor(2) as pool:
            publishing = [pool.submit(publish, partition) for partition in (0, 1)]
            try:
                # Here and not in a thread: with the thread that starts a server, the server ends.
                for _ in range(2):
                    flowing.clear()
                    assert flowing.wait(120.0)
                    server.kill()
                    server.revive()
                flowing.clear()
                assert flowing.wait(120.0)
            finally:
                enough.set()
            for done in publishing:
                done.result(120.0)
        total = sum(map(len, published.values()))
        found = by_partition(collect(subscription, total, seconds=60.0))
        for partition in (0, 1):
            assert topic.bounds(partition) == Bounds(0, len(published[partition]))
            assert found[partition] == sorted(published[partition].items())
            # In the order in which they were published, and each once.
            assert [int(payload) for _, payload in found[partition]] == list(range(len(found[partition])))
