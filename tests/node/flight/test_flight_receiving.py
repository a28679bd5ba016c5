"""What a replica takes from the wire: whole batches, each behind the one before; anything else is damage."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import CorruptData, TransientStorageError
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.arrow.header import admit_batch
from strandline.formats.node.wire import Flag, Note, decode_note
from strandline.model.head import LogBatch, WriterId
from strandline.model.node import Heartbeat
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.client.stream_receiver import Assembler, Receiver, read_part
from strandline.node.flight.wire.streams import parts
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.node.flight.flight_double import records, values_of

HEARTBEAT = Heartbeat(3, 1, 9, 8, 2)
WRITER = WriterId(UUID(int=4))


def batch(first, *values, term=2, append=None):
    return LogBatch(first, term, 77, append, tuple(records(value) for value in values))


def page_of(part):
    return encode_page(part, Compression.NONE) if part.num_rows else []


def wired(log_batch):
    """Its parts as they arrive."""
    return [
        (pa.ipc.read_record_batch(pa.py_buffer(message), RECORD_SCHEMA), decode_note(note, "a node"))
        for message, note in parts(log_batch, HEARTBEAT)
    ]


def assembled(assembler, pairs):
    found = []
    for part, note in pairs:
        if part is None:
            assembler.check_note(note)
        elif (whole := assembler.add(part, note, page_of(part))) is not None:
            found.append(whole)
    return found


def test_parts_become_the_batch_that_they_were():
    sent = batch(5, b"a", b"b", b"c", append=(WRITER, 6))
    (found,) = assembled(Assembler("a node", 5), wired(sent))
    assert (found.first, found.term, found.timestamp, found.append) == (5, 2, 77, (WRITER, 6))
    assert values_of(found.batches) == [b"a", b"b", b"c"]


def test_batches_follow_one_another_and_beats_may_come_between():
    assembler = Assembler("a node", 5)
    heartbeat = (None, Note(Flag.HEARTBEAT, 0, 0, 0, 0, None, HEARTBEAT))
    pairs = [*wired(batch(4, b"a", b"b")), heartbeat, *wired(batch(6, b"c")), heartbeat, *wired(batch(7, b"d", term=3))]
    assert [found.first for found in assembled(assembler, pairs)] == [4, 6, 7]


def test_records_that_changed_on_the_way_are_damage_whatever_arrow_says():
    sent = records(b"a" * 100)
    ((_, note),) = parts(LogBatch(0, 1, 0, None, (sent,)), HEARTBEAT)
    altered = records(b"a" * 99 + b"b")
    altered.validate(full=True)
    for data in (sent, altered):
        chunk = SimpleNamespace(data=data, app_metadata=pa.py_buffer(note))
        if data is sent:
            assert read_part(chunk, "a node")[1].first == 0
        else:
            with pytest.raises(CorruptData, match="do not match their checksum"):
                read_part(chunk, "a node")


WHOLE = wired(batch(0, b"a", b"b", b"c"))


def with_note(index, **changes):
    pairs = list(WHOLE)
    pairs[index] = (pairs[index][0], pairs[index][1]._replace(**changes))
    return pairs


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([WHOLE[0], WHOLE[2]], id="a part is missing"),
        pytest.param([*WHOLE[:2], *wired(batch(3, b"d"))], id="the last part is missing"),
        pytest.param([*WHOLE[:2], WHOLE[1], WHOLE[2]], id="a part came twice"),
        pytest.param([*WHOLE, *WHOLE], id="a batch came twice"),
        pytest.param([*WHOLE, *wired(batch(4, b"d"))], id="a record is left out"),
        pytest.param(wired(batch(1, b"d")), id="it begins too late"),
        pytest.param(with_note(1, first=1), id="another batch's part"),
        pytest.param(with_note(1, term=9), id="another term"),
        pytest.param(with_note(1, append=(WRITER, 1)), id="another writer"),
        pytest.param(with_note(0, records=1), id="more records than announced"),
        pytest.param(with_note(2, flags=0), id="no part is the last"),
        pytest.param(with_note(0, flags=Flag.LAST), id="the first part is the last"),
        pytest.param(with_note(0, flags=Flag.READ), id="a reader's part"),
        pytest.param(with_note(0, flags=Flag.HEARTBEAT), id="a heartbeat with records"),
        pytest.param([(WHOLE[0][0].slice(0, 0), WHOLE[0][1])], id="a part without records"),
        pytest.param(
            [(WHOLE[0][0].slice(0, 0), Note(Flag.HEARTBEAT, 0, 0, 0, 0, None, HEARTBEAT))],
            id="a heartbeat with a batch",
        ),
        pytest.param(
            [WHOLE[0], (None, Note(Flag.HEARTBEAT, 0, 0, 0, 0, None, HEARTBEAT))], id="a heartbeat among parts"
        ),
        pytest.param([(None, WHOLE[0][1])], id="a note without its part"),
    ],
)
def test_anything_else_is_damage(pairs):
    with pytest.raises(CorruptData, match="a node"):
        assembled(Assembler("a node", 0), pairs)


def columns_of(part, **changes):
    arrays = [changes.get(field.name, part.column(field.name)) for field in RECORD_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)


def lying_array():
    """A value that ends far behind its bytes, in a column that ends where it should."""
    offsets = pa.py_buffer(b"".join(end.to_bytes(4, "little") for end in (0, 1000, 3)))
    return pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"abc")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": lying_array()},
        {"op": pa.array([0, 7], pa.int8())},
        {"op": pa.array([0, None], pa.int8())},
        {"timestamp": pa.array([0, None], RECORD_SCHEMA.field("timestamp").type)},
    ],
    ids=["value", "op", "no op", "no timestamp"],
)
def test_records_that_are_damaged_are_not_let_through(wrong):
    ((part, note),) = wired(LogBatch(0, 2, 77, None, (records(b"a", b"b"),)))
    with pytest.raises(CorruptData, match="a node"):
        Assembler("a node", 0).add(admit_batch(columns_of(part, **wrong), "a node"), note, [])


class Chunks:
    """A stream that gives what it was given, and waits at its end until it is cancelled."""

    def __init__(self, *sizes, then=None):
        self.sizes, self.then, self.given = list(sizes), then, threading.Semaphore(0)
        self.cancelled = threading.Event()

    def read_chunk(self):
        if not self.sizes:
            if self.then is not None:
                raise self.then
            self.cancelled.wait(120)
            raise StopIteration
        self.given.release()
        return self.sizes.pop(0)

    def cancel(self):
        self.cancelled.set()


def receiver(chunks, **options):
    accept = lambda size: (size, size) if size else None
    defaults = {"url": "a node", "what": "it", "silence": 1000, "queue_bytes": 100}
    return Receiver(lambda: nullcontext(chunks), accept, **(defaults | options))


def test_a_receiver_buffers_up_to_its_byte_limit_and_at_least_one_message():
    chunks = Chunks(500, 60, 40, 10)
    found = receiver(chunks)
    for _ in range(2):
        assert chunks.given.acquire(timeout=120)
    # The second one waits, in the thread's hands, until the first is taken.
    assert found.take(10) == [500]
    for _ in range(2):
        assert chunks.given.acquire(timeout=120)
    assert found.take(10, most=60) == [60]
    assert found.take(10, most=1) == [40]
    assert found.take(10) == [10]
    found.close()


def test_received_items_are_taken_before_the_error_that_ended_the_stream():
    found = receiver(Chunks(1, 2, then=CorruptData("It is damaged.")))
    taken = []
    while len(taken) < 2:
        taken += found.take(10)
    assert taken == [1, 2]
    for _ in range(2):
        with pytest.raises(CorruptData):
            found.take(10)


def test_silence_counts_only_while_nothing_waits_to_be_taken():
    clock = ManualClock()
    chunks = Chunks(1)
    found = receiver(chunks, silence=5, env=Env(clock=clock))
    assert chunks.given.acquire(timeout=120)
    assert found.take(10) == [1]
    clock.advance(4)
    assert found.take(0) == []
    clock.advance(2)
    with pytest.raises(TransientStorageError, match="nothing for 5 s"):
        found.take(0)
    found.close()


def test_closing_ends_a_thread_that_waits_for_room():
    chunks = Chunks(500, 60)
    found = receiver(chunks)
    for _ in range(2):
        assert chunks.given.acquire(timeout=120)
    found.close()
    assert not found._thread.is_alive()
    with pytest.raises(TransientStorageError, match="closed"):
        found.take(0)


def test_closing_does_not_wait_for_a_stream_that_has_not_begun():
    began, go = threading.Event(), threading.Event()
    chunks = Chunks(1)

    def begin():
        began.set()
        go.wait(120)
        return nullcontext(chunks)

    found = Receiver(begin, lambda size: (size, size), url="a node", what="it", silence=1000)
    assert began.wait(120)
    found.close()
    go.set()
    found._thread.join(120)
    assert chunks.cancelled.is_set()
