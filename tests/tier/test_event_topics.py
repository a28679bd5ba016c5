"""Segment events on every kind of topic: the manager and the tiers above it are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

import strandline as sl
from strandline.log.topic.contract import Topic
from strandline.log.topic.kafka import KafkaTopic
from strandline.log.topic.logs import open_object_topic, open_wal_topic
from strandline.model.segments import SegmentState
from strandline.tier.metadata.manager import MetadataManager
from tests.servers import KafkaServer
from tests.tier.metadata.manager_doubles import TERM, copied, place, segment, update

KINDS = ["wal", "object", "kafka"]


@pytest.fixture(params=KINDS)
def topic(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Topic]:
    with ExitStack() as opened:
        match request.param:
            case "wal":
                yield opened.enter_context(open_wal_topic(str(tmp_path / "topic"), 4))
            case "object":
                yield opened.enter_context(open_object_topic(f"file://{tmp_path}/topic", 4))
            case "kafka":
                server: KafkaServer = request.getfixturevalue("kafka_server")
                yield opened.enter_context(KafkaTopic(server.bootstrap, f"events-{uuid4().hex}", 4))


def test_all_managers_see_the_events_of_one_and_a_restart_replays_only_the_rest(topic: Topic, tmp_path: Path) -> None:
    here = place(1)
    with ExitStack() as closing:
        one = MetadataManager.start(topic, snapshot_dir=tmp_path / "one")
        closing.callback(one.close)
        other = MetadataManager.start(topic)
        closing.callback(other.close)
        for manager in (one, other):
            manager.reconcile_assignment([1])
        one.publish_all([event for number in range(20) for event in copied(here, number)])
        other.add(segment(here, 20))
        assert one.current(here, lambda cache: len(list(cache.segments(here)))) == 21
        assert other.segment_for(here, TERM, 1950).start == 1900
        assert other.segment_for(here, TERM, 2050) is None  # its copy has not finished
        one.close()
        other.update(update(segment(here, 20)))
        again = MetadataManager.start(topic, snapshot_dir=tmp_path / "one")
        closing.callback(again.close)
        assert again.committed_offset(1) == 40
        again.reconcile_assignment([1])
        found = again.current(here, lambda cache: cache.segment_for(here, TERM, 2050))
        assert found.state is SegmentState.COPY_FINISHED
        assert again.committed_offset(1) == 41


def test_a_log_is_tiered_with_its_events_on_kafka(kafka_server: KafkaServer, tmp_path: Path) -> None:
    events = f"kafka://{kafka_server.bootstrap}/tier-{uuid4().hex}"
    log = sl.open(f"file://{tmp_path}/log", create=True, retention="consumed")
    assert isinstance(log, sl.log.ObjectLog)
    with log.producer(linger=0.0) as producer:
        for number in range(10):
            producer.append(value=b"%d" % number).result(120)
    sl.tier.attach(log, events=events, partitions=2)
    with sl.tier.tiering(log) as tierer:
        tierer.run_once(everything=True)
    log.trim(grace=0)
    with sl.open(log.url) as both:
        assert isinstance(both, sl.tier.TieredLog)
        assert log.bounds().first == 10
        values = [value for batch in both.read() for value in batch.column("value").to_pylist()]
        assert values == [b"%d" % number for number in range(10)]
