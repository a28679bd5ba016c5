"""Partitions of Kafka topics as sources."""

from __future__ import annotations

import itertools
import time

import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged, InvalidInput, NotFound, Unsupported
from strandline.ingestion.kafka import KafkaPartition
from strandline.log.memory import MemoryLog
from strandline.log.object.log import open_log
from strandline.model.records import Op
from strandline.testing.plain import PlainStore
from tests.ingestion.sources import content, position

confluent_kafka = pytest.importorskip("confluent_kafka")
pytest.importorskip("confluent_kafka.admin")
NAMES = itertools.count()
pytestmark = pytest.mark.matrix


@pytest.fixture
def topic(kafka_server):
    name = f"ingested-{next(NAMES)}"
    create(kafka_server, name)
    return name


def create(server, name, partitions=1, **config):
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": server.bootstrap})
    made = confluent_kafka.admin.NewTopic(name, partitions, replication_factor=1, config=config)
    admin.create_topics([made])[name].result(60)
    deadline = time.monotonic() + 60
    while admin.list_topics(name, timeout=60).topics[name].error is not None:
        assert time.monotonic() < deadline


def produce(server, topic, count, first=0, **settings):
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap, **settings})
    transactional = "transactional.id" in settings
    if transactional:
        producer.init_transactions(60)
        producer.begin_transaction()
    for number in range(first, first + count):
        producer.produce(
            topic,
            key=b"k%d" % number,
            value=None if number % 5 == 3 else b"v%d" % number,
            headers=[("trace", b"%d" % number), ("trace", b"x")] if number % 2 else None,
            timestamp=1_700_000_000_000 + number,
            partition=0,
        )
    producer.flush(60)
    return producer


def place(topic, offset):
    return confluent_kafka.TopicPartition(topic, 0, offset)


def until_done(action):
    """A change that the broker refuses while an earlier one is under way."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return action()
        except confluent_kafka.KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def ingest(server, topic, target, **options):
    return sl.ingest(f"kafka://{server.bootstrap}/{topic}", target, **options)


def test_messages_become_records_once_and_in_order_with_keys_tombstones_times_and_headers(kafka_server, topic):
    target = MemoryLog()
    produce(kafka_server, topic, 10)
    assert ingest(kafka_server, topic, target).records == 10
    produce(kafka_server, topic, 5, first=10)
    assert ingest(kafka_server, topic, target).records == 5
    assert ingest(kafka_server, topic, target).records == 0
    rows = content(target).to_pylist()
    assert [row["key"] for row in rows] == [b"k%d" % number for number in range(15)]
    assert [row["value"] for row in rows] == [None if number % 5 == 3 else b"v%d" % number for number in range(15)]
    assert [row["op"] for row in rows] == [Op.DELETE if number % 5 == 3 else Op.PUT for number in range(15)]
    assert content(target)["timestamp"].cast("int64").to_pylist() == [
        (1_700_000_000_000 + number) * 1000 for number in range(15)
    ]
    assert rows[1]["headers"] == [("trace", b"1"), ("trace", b"x")]
    assert rows[2]["headers"] is None


def test_gaps_of_transactions_are_passed_and_aborted_messages_are_not_ingested(kafka_server, topic):
    target = MemoryLog()
    for number, commits in enumerate([True, False, True]):
        settings = {"transactional.id": f"{topic}-{number}"}
        producer = produce(kafka_server, topic, 4, first=4 * number, **settings)
        producer.commit_transaction(60) if commits else producer.abort_transaction(60)
    assert ingest(kafka_server, topic, target).records == 8
    assert content(target)["key"].to_pylist() == [b"k%d" % number for number in (*range(4), *range(8, 12))]
    assert ingest(kafka_server, topic, target).records == 0
    produce(kafka_server, topic, 1, first=99)
    assert ingest(kafka_server, topic, target).records == 1
    assert position_of(kafka_server, topic, target) == 16


def position_of(server, topic, target):
    with KafkaPartition(f"kafka://{server.bootstrap}/{topic}") as source:
        return position(source, target)


def test_deleted_messages_are_skipped_only_if_that_is_said(kafka_server, topic):
    target = MemoryLog()
    produce(kafka_server, topic, 4)
    ingest(kafka_server, topic, target)
    produce(kafka_server, topic, 6, first=4)
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.list_topics(topic, timeout=60)  # the client asks for the leaders once, and only of topics that it knows
    until_done(lambda: [each.result(60) for each in admin.delete_records([place(topic, 7)]).values()])
    with pytest.raises(CursorExpired, match=r"begins at offset 7, .* holds it up to 4"):
        ingest(kafka_server, topic, target)
    assert ingest(kafka_server, topic, target, skip_trimmed=True).records == 3
    assert content(target)["key"].to_pylist()[4:] == [b"k7", b"k8", b"k9"]


def test_a_topic_that_was_created_again_is_refused_whether_it_is_shorter_or_longer(kafka_server, topic):
    target = MemoryLog()
    produce(kafka_server, topic, 6)
    ingest(kafka_server, topic, target)
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.delete_topics([topic], operation_timeout=60)[topic].result(60)
    until_done(lambda: create(kafka_server, topic))
    produce(kafka_server, topic, 2, first=50)
    with pytest.raises(Diverged, match=r"ends at offset 2, and .* holds it up to 6"):
        ingest(kafka_server, topic, target)
    produce(kafka_server, topic, 8, first=60)
    with pytest.raises(Diverged, match=r"^The source has another history"):
        ingest(kafka_server, topic, target)
    assert target.bounds().next == 6


def test_a_topic_that_was_created_again_with_the_same_messages_is_another_history(kafka_server, topic):
    target, parallel = MemoryLog(), open_log(PlainStore(), create=True)
    produce(kafka_server, topic, 6)
    ingest(kafka_server, topic, target)
    sl.bulk.ingest(f"kafka://{kafka_server.bootstrap}/{topic}", parallel)
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.delete_topics([topic], operation_timeout=60)[topic].result(60)
    until_done(lambda: create(kafka_server, topic))
    produce(kafka_server, topic, 7)
    for copy in (target, parallel):
        with pytest.raises(Diverged, match=r"^The source has another history"):
            ingest(kafka_server, topic, copy)
        assert copy.bounds().next == 6


def test_a_partition_whose_last_ingested_message_was_deleted_is_continued(kafka_server, topic):
    target = MemoryLog()
    produce(kafka_server, topic, 6)
    ingest(kafka_server, topic, target)
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.list_topics(topic, timeout=60)
    until_done(lambda: [each.result(60) for each in admin.delete_records([place(topic, 6)]).values()])
    produce(kafka_server, topic, 2, first=6)
    assert ingest(kafka_server, topic, target).records == 2


def test_a_topic_with_several_partitions_needs_one_of_them_and_each_is_a_source_of_its_own(kafka_server):
    name = f"ingested-{next(NAMES)}"
    create(kafka_server, name, 2)
    produce(kafka_server, name, 3)
    target = MemoryLog()
    with pytest.raises(NotFound, match="has 2 partitions: ingest each of them"):
        ingest(kafka_server, name, target)
    with pytest.raises(NotFound, match="has no partition 7"):
        ingest(kafka_server, f"{name}/7", target)
    assert ingest(kafka_server, f"{name}/0", target).records == 3
    assert ingest(kafka_server, f"{name}/1", target).records == 0
    with pytest.raises(NotFound, match=r"^There is no topic nowhere"):
        ingest(kafka_server, "nowhere", target)


def test_a_partition_has_no_slots_no_times_and_no_credentials_in_its_address(kafka_server, topic):
    with pytest.raises(Unsupported, match="has no slots"):
        ingest(kafka_server, topic, MemoryLog(), slot="mine")
    with pytest.raises(InvalidInput, match="sasl"):
        sl.ingest(f"kafka://me:secret@{kafka_server.bootstrap}/{topic}", MemoryLog())


@pytest.mark.parametrize("time", [253_402_300_800_000, 1_700_000_000_000_000_000, (1 << 63) - 1])
def test_a_message_with_a_time_that_no_calendar_has_does_not_stop_the_partition(kafka_server, time):
    name = f"ingested-{next(NAMES)}"
    create(kafka_server, name, **{"message.timestamp.after.max.ms": str((1 << 63) - 1)})
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka_server.bootstrap})
    producer.produce(name, key=b"k", value=b"v", timestamp=time)
    producer.flush(60)
    target = open_log(PlainStore(), create=True)
    assert ingest(kafka_server, name, target).records == 1
    assert ingest(kafka_server, name, target).records == 0
    assert content(target)["timestamp"].cast("int64").to_pylist() == [min(time * 1000, (1 << 63) - 1)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nonsense": 1}, "source_options"),
        ({"timeout": "x"}, "timeout is a number of seconds"),
        ({"timeout": -1}, "timeout is a number of seconds"),
        ({"config": "x"}, "config is a Mapping"),
    ],
)
def test_wrong_options_are_one_sentence(kafka_server, topic, options, why):
    with pytest.raises(InvalidInput, match=why):
        ingest(kafka_server, topic, MemoryLog(), source_options=options)


def test_a_start_behind_the_end_is_refused_in_parallel_too(kafka_server, topic):
    target = open_log(PlainStore(), create=True)
    with pytest.raises(InvalidInput, match="start is 7, and the source ends at 0"):
        sl.bulk.ingest(f"kafka://{kafka_server.bootstrap}/{topic}", target, start=7)


def test_an_empty_group_is_refused_before_the_client_sees_it(kafka_server, topic):
    with pytest.raises(InvalidInput, match=r"group\.id of Kafka's client may not be empty"):
        ingest(kafka_server, topic, MemoryLog(), source_options={"config": {"group.id": None}})


def test_an_open_transaction_is_waited_for_without_an_error(kafka_server, topic):
    produce(kafka_server, topic, 2)
    settings = {"transactional.id": f"{topic}-open", "transaction.timeout.ms": 600_000}
    open_one = produce(kafka_server, topic, 3, first=2, **settings)
    with KafkaPartition(f"kafka://{kafka_server.bootstrap}/{topic}", timeout=5.0) as source:
        (span,) = source.plan(source.start())
        assert span.batch.num_rows == 2
        cursor = source.start().at(span.next)
        deadline = time.monotonic() + 6  # longer than the source waits for a message
        while time.monotonic() < deadline:
            assert source.plan(cursor) == []
        open_one.commit_transaction(60)
        until = time.monotonic() + 60
        while not (spans := source.plan(cursor)):
            assert time.monotonic() < until
        assert spans[0].batch.column("key").to_pylist() == [b"k2", b"k3", b"k4"]


def test_a_large_partition_is_read_by_many_tasks_in_ranges_also_where_some_have_no_records(
    kafka_server, topic, monkeypatch
):
    monkeypatch.setattr("strandline.bulk.ingesting.TASK_POSITIONS", 7)
    produce(kafka_server, topic, 30)
    aborted = produce(kafka_server, topic, 40, 100, **{"transactional.id": f"bulk-{topic}"})
    aborted.abort_transaction(60)
    produce(kafka_server, topic, 20, 200)
    alone, together = MemoryLog(), open_log(PlainStore(), create=True)
    ingest(kafka_server, topic, alone)
    address = f"kafka://{kafka_server.bootstrap}/{topic}"
    done = sl.bulk.ingest(address, together, pool=sl.bulk.ThreadPool(2))
    assert done.records == 50
    assert content(together).equals(content(alone))
    produce(kafka_server, topic, 1, 300)
    assert sl.bulk.ingest(address, together).records == 1
    assert ingest(kafka_server, topic, together).records == 0
    with pytest.raises(InvalidInput, match="by its address"), KafkaPartition(address) as stream:
        sl.bulk.ingest(stream, together)
