"""A replica's side of the wire: every call arrives as it was made, and every answer and error as it was given."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from strandline import errors
from strandline.errors import (
    CorruptData,
    CursorExpired,
    Diverged,
    ExpectationFailed,
    Fenced,
    InvalidInput,
    NotFound,
    NotReady,
    StorageError,
    StrandlineError,
    TransientStorageError,
)
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.server.actions import NodeService
from strandline.node.flight.server.server import FlightNode
from strandline.node.messages import Caller, ReplicaProgress, Upstream
from tests.node.flight.flight_double import ANSWERS, CHUNK, Node, records, values_of

ME = Caller("replica-1", 2)
FOR_EVER = 1 << 30


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path / "log")
    yield node
    node.close()


@pytest.fixture
def server(node):
    with FlightNode(node, heartbeat_seconds=0.05) as server:
        yield server


@pytest.fixture
def upstream(server):
    with FlightUpstream(server.url) as upstream:
        yield upstream


def taken(feed, count):
    """The next ``count`` log batches."""
    found = []
    while len(found) < count:
        found += feed.take(5)
    return found


def test_both_ends_keep_the_contract(node, upstream):
    assert isinstance(node, NodeService)
    assert isinstance(upstream, Upstream)


def test_registering_and_the_topology_come_through_whole(node, upstream):
    expected = node.topology(ME)
    found = upstream.register(ME, region="eu")
    assert (found.topology, found.position) == (expected, None)
    assert upstream.topology(ME) == expected
    upstream._channel.call("unregister", **ME._asdict(), keep_slot=True)
    assert ("register", ME, "eu") in node.asked
    assert node.asked[-1] == ("unregister", ME, True)


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_every_way_to_resume_comes_through(node, upstream, answer):
    node.answer = answer
    assert upstream.resume(ME, Cursor(node.log.log_id, 4, 1)) == answer
    assert upstream.resume(ME, None) == answer
    assert [asked[2] for asked in node.asked] == [Cursor(node.log.log_id, 4, 1), None]


def test_a_report_comes_through(node, upstream):
    assert upstream.report(ME) == node.report(ME)


def test_a_feed_gives_the_batches_as_they_were_written(node, upstream):
    writer = WriterId(node.log.log_id)
    table = records(b"a", b"b")
    node.log.append_batch(table, writer=writer, number=0, term=1, timestamp=77).result(120)
    node.log.append_batch(records(b"c"), term=2, timestamp=78).result(120)
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    first, second = taken(feed, 2)
    assert (first.first, first.term, first.timestamp, first.append) == (0, 1, 77, (writer, 0))
    assert (second.first, second.term, second.timestamp, second.append) == (2, 2, 78, None)
    assert first.batches[0].equals(table)
    assert values_of(second.batches) == [b"c"]
    feed.close()


def test_a_log_batch_of_several_arrow_batches_stays_one(node, upstream):
    table = pa.Table.from_batches([records(b"a"), records(b"b", b"c")])
    node.log.append_batch(table).result(120)
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    (batch,) = taken(feed, 1)
    assert (batch.count, values_of(batch.batches)) == (3, [b"a", b"b", b"c"])
    feed.close()


def test_a_feed_follows_and_brings_beats_while_nothing_happens(node, upstream):
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    while feed.heartbeat is None:
        assert list(feed.take(5)) == []
    assert feed.heartbeat == node.heartbeat()
    node.epoch = 12
    while feed.heartbeat.epoch != 12:
        assert list(feed.take(5)) == []
    node.log.append_batch(records(b"later")).result(120)
    assert values_of(taken(feed, 1)[0].batches) == [b"later"]
    assert feed.heartbeat.durable == 1
    feed.close()


def test_a_beat_that_says_something_new_does_not_wait_for_its_time(node):
    with FlightNode(node, heartbeat_seconds=1000) as server, FlightUpstream(server.url) as upstream:
        feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
        while feed.heartbeat is None:
            feed.take(5)
        node.epoch = 12
        while feed.heartbeat.epoch != 12:
            assert list(feed.take(5)) == []
        feed.close()


def test_a_feed_in_the_middle_of_a_batch_gives_the_whole_of_it(node, upstream):
    node.log.append_batch(records(b"a", b"b", b"c")).result(120)
    feed = upstream.feed(ME, Cursor(node.log.log_id, 1))
    assert taken(feed, 1)[0].first == 0
    feed.close()


def test_closing_a_feed_ends_it_on_the_node_too(node, server, upstream):
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    feed.take(5)
    feed.close()
    feed.close()
    assert node.closed_feeds.acquire(timeout=120)
    with pytest.raises(TransientStorageError, match="closed"):
        feed.take(0)


def test_a_feed_that_a_client_leaves_unread_is_bounded(node, server, monkeypatch):
    monkeypatch.setattr("strandline.node.flight.client.stream_receiver.QUEUE_BYTES", 2 << 20)
    for _ in range(64):
        node.log.append_batch(records(bytes(1 << 20))).result(120)
    with FlightUpstream(server.url) as upstream:
        feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
        got = 0
        while got < 64:
            came = feed.take(5)
            assert sum(batch.size for batch in came) <= 4 << 20
            got += len(came)
        feed.close()


@pytest.mark.parametrize("error", [CursorExpired("It is gone."), Fenced("Not you."), Diverged("Another log.")], ids=str)
def test_why_a_feed_ended_is_raised_as_what_it_was(node, upstream, error):
    node.feed_error = error
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    with pytest.raises(type(error), match=str(error)):
        taken(feed, FOR_EVER)
    feed.close()


def test_items_received_before_an_error_are_taken_first(node, upstream):
    node.log.append_batch(records(b"a")).result(120)
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    assert values_of(taken(feed, 1)[0].batches) == [b"a"]
    node.feed_error = CursorExpired("It is gone.")
    with pytest.raises(CursorExpired):
        taken(feed, FOR_EVER)


def test_an_acknowledgement_is_answered(node, upstream):
    progress = ReplicaProgress(5, 4, 3, 2)
    found = upstream.acknowledge(ME, progress)
    assert (found.heartbeat, found.refused) == (node.heartbeat(), None)
    node.refused = "The slot is invalid: wal-removed."
    assert upstream.acknowledge(Caller("replica-1", 9), progress).refused == node.refused
    assert node.asked == [("acknowledge", ME, progress), ("acknowledge", Caller("replica-1", 9), progress)]


def test_unanswered_acknowledgements_arrive_in_order(node, upstream):
    for position in range(5):
        assert upstream.acknowledge_nowait(ME, ReplicaProgress(position, position)) is None
    found = upstream.acknowledge(ME, ReplicaProgress(9, 9))
    assert (found.heartbeat, found.refused) == (node.heartbeat(), None)
    assert [(what, progress.durable) for what, _, progress in node.asked] == [
        *(("acknowledge_nowait", position) for position in range(5)),
        ("acknowledge", 9),
    ]


def test_the_next_answer_says_that_an_unanswered_acknowledgement_did_not_count(node, upstream):
    node.refused = "The slot is invalid: wal-removed."
    upstream.acknowledge_nowait(ME, ReplicaProgress(1, 1))
    assert node.heard.acquire(timeout=120)
    node.refused = None
    assert upstream.acknowledge(ME, ReplicaProgress(1, 1)).refused == "The slot is invalid: wal-removed."


def test_an_error_of_an_unanswered_acknowledgement_is_raised_by_a_later_one_which_then_continues(node, upstream):
    node.error = NotFound("There is no replica 'replica-1'.")
    upstream.acknowledge_nowait(ME, ReplicaProgress(1, 1))
    assert node.heard.acquire(timeout=120)
    node.error = None
    with pytest.raises(NotFound, match="no replica"):
        upstream.acknowledge(ME, ReplicaProgress(1, 1))
    assert upstream.acknowledge(ME, ReplicaProgress(1, 1)).refused is None


def test_a_failed_acknowledgement_is_raised_and_the_next_one_goes_through(node, upstream):
    node.error = NotFound("There is no replica 'replica-1'.")
    for _ in range(2):
        with pytest.raises(NotFound, match="no replica"):
            upstream.acknowledge(ME, ReplicaProgress(1, 1))
    node.error = None
    assert upstream.acknowledge(ME, ReplicaProgress(1, 1)).refused is None


def test_acknowledgements_of_two_names_do_not_mix(node, upstream):
    upstream.acknowledge(ME, ReplicaProgress(1, 1))
    upstream.acknowledge(Caller("replica-2"), ReplicaProgress(2, 2))
    assert [asked[1].name for asked in node.asked] == ["replica-1", "replica-2"]


ALL_ERRORS = sorted(
    (found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, StrandlineError)),
    key=lambda kind: kind.__name__,
)


def test_every_error_comes_back_as_what_it_was(node, upstream):
    for kind in ALL_ERRORS:
        node.error = kind("Was ist? Möglich: 'ja'.")
        with pytest.raises(StrandlineError) as found:
            upstream.resume(ME, None)
        assert (type(found.value), str(found.value)) == (kind, "Was ist? Möglich: 'ja'.")


def test_a_failed_expectation_says_where_the_log_ended(node, upstream):
    node.error = ExpectationFailed("It ended elsewhere.")
    node.error.end = 42
    with pytest.raises(ExpectationFailed) as found:
        upstream.resume(ME, None)
    assert found.value.end == 42


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", "\x00", "\ud800", '"'])
def test_a_sentence_of_any_length_and_letters_arrives(node, upstream, letter):
    node.error = CorruptData("It is damaged: " + letter * 100_000)
    with pytest.raises(CorruptData, match="It is damaged"):
        upstream.resume(ME, None)


def test_an_unexpected_error_is_reported_without_its_trace(node, upstream, caplog):
    node.error = RuntimeError("secret detail")
    with pytest.raises(StorageError, match="RuntimeError") as found:
        upstream.resume(ME, None)
    assert "secret" not in str(found.value)
    assert "secret detail" in caplog.text


def test_a_snapshot_comes_in_chunks_from_any_byte_on(node, upstream):
    data = bytes(range(256)) * (10 * CHUNK // 256) + b"the end"
    node.files = {"data/a": data, "data/none": b""}
    offer = upstream.begin_snapshot(ME, "wal")
    assert (offer.name, offer.manifest) == ("snapshot-1", b'\x00\xff{"not": "text"}')
    assert b"".join(chunk.data for chunk in upstream.chunks(ME, offer.name, "data/a", 0)) == data
    rest = list(upstream.chunks(ME, offer.name, "data/a", 3 * CHUNK + 5))
    assert b"".join(chunk.data for chunk in rest) == data[3 * CHUNK + 5 :]
    assert rest[0].offset == 3 * CHUNK + 5
    assert list(upstream.chunks(ME, offer.name, "data/none", 0)) == []
    with pytest.raises(NotFound):
        list(upstream.chunks(ME, offer.name, "data/b", 0))
    upstream.end_snapshot(ME, Cursor(node.log.log_id, 7, 1))
    assert node.asked[-1] == ("end_snapshot", ME, Cursor(node.log.log_id, 7, 1))


def test_a_file_larger_than_one_call_fetches_is_whole(node, upstream, monkeypatch):
    monkeypatch.setattr("strandline.node.flight.client.primary_client._FETCHED", 2 * CHUNK)
    node.files = {"a": bytes(4 * CHUNK), "b": bytes(5 * CHUNK + 1)}
    for path, data in node.files.items():
        assert b"".join(chunk.data for chunk in upstream.chunks(ME, "s", path, 0)) == data


def test_a_node_that_is_not_there_is_transient(tmp_path):
    node = Node(tmp_path / "log")
    server = FlightNode(node)
    url = server.url
    server.close()
    node.close()
    with FlightUpstream(url, timeout=2) as upstream:
        for call in (lambda: upstream.resume(ME, None), lambda: upstream.acknowledge(ME, ReplicaProgress(0, 0))):
            with pytest.raises(TransientStorageError, match="did not answer"):
                call()
        feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
        with pytest.raises(TransientStorageError):
            taken(feed, FOR_EVER)


def test_a_call_that_is_not_answered_in_time_is_transient(node, server):
    release = threading.Event()
    node.note = lambda *_: release.wait(120)
    with FlightUpstream(server.url, timeout=0.2) as upstream:
        for call in (lambda: upstream.resume(ME, None), lambda: upstream.acknowledge(ME, ReplicaProgress(0, 0))):
            with pytest.raises(TransientStorageError):
                call()
        release.set()
        del node.note
        # A late answer was not taken for this one's.
        node.refused = "no"
        assert upstream.acknowledge(ME, ReplicaProgress(3, 3)).refused == "no"


def test_closing_does_not_wait_for_an_acknowledgement_that_nobody_answers(node, server):
    asked, release = threading.Event(), threading.Event()
    node.note = lambda *_: (asked.set(), release.wait(120))
    upstream = FlightUpstream(server.url, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(upstream.acknowledge, ME, ReplicaProgress(0, 0))
        assert asked.wait(120)
        upstream.close()
        with pytest.raises(TransientStorageError):
            waiting.result(120)
        release.set()


def test_a_node_that_says_nothing_is_taken_for_lost(node, tmp_path):
    with FlightNode(node, heartbeat_seconds=1000) as server, FlightUpstream(server.url, timeout=0.3) as upstream:
        feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
        with pytest.raises(TransientStorageError, match="nothing for"):
            taken(feed, FOR_EVER)
        feed.close()


def test_a_client_finds_a_node_that_came_back(tmp_path):
    node = Node(tmp_path / "log")
    server = FlightNode(node)
    with FlightUpstream(server.url) as upstream:
        upstream.acknowledge(ME, ReplicaProgress(0, 0))
        server.close()
        with pytest.raises(StrandlineError):
            upstream.acknowledge(ME, ReplicaProgress(0, 0))
        with FlightNode(node, port=server.port):
            for _ in range(1000):
                try:
                    upstream.acknowledge(ME, ReplicaProgress(1, 1))
                    break
                except (TransientStorageError, NotReady):
                    threading.Event().wait(0.02)
            upstream.resume(ME, None)
    node.close()


def test_closing_a_node_ends_its_streams_at_once(node, server, upstream):
    feed = upstream.feed(ME, Cursor(node.log.log_id, 0))
    feed.take(5)
    upstream.acknowledge(ME, ReplicaProgress(0, 0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(taken, feed, FOR_EVER)
        server.close()
        server.close()
        with pytest.raises((NotReady, TransientStorageError)):
            waiting.result(120)
    assert node.closed_feeds.acquire(timeout=120)


class SetByWaiting(threading.Event):
    """An event that is set as soon as a thread waits for it."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


def test_closing_a_node_without_calls_waits_until_its_port_is_released(node, monkeypatch):
    released = SetByWaiting()
    with FlightNode(node) as server:
        stop = server._server.stop
        monkeypatch.setattr(server._server, "stop", lambda grace: (stop(grace), released)[1])
    assert released.is_set()


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1", "grpc://", "127.0.0.1:7"])
def test_an_address_that_is_none_is_refused_at_once(url):
    with pytest.raises(InvalidInput, match=r"no address|no path or address"):
        FlightUpstream(url)
