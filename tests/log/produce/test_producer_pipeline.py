"""The producer's pipeline: batches close in time, uploads overlap, one write lists all, and memory stays bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import BufferFull, Contended, InvalidInput
from strandline.formats.arrow.block import Compression
from strandline.log.object import ObjectLog, Producer, open_log
from strandline.log.object.upload import Lister, ObjectShipper
from strandline.log.produce.committer import ListingPace
from strandline.log.produce.rows import BatchRows, page_of
from strandline.log.produce.shipper import Limits
from strandline.model.cursor import Bounds
from strandline.model.head import Head, Receipt, WriterId
from strandline.model.records import Op, record_batch
from strandline.model.stamp import OpId
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import together
from tests.contracts.logs import content, fetched, records, writer_named
from tests.contracts.slots import append
from tests.log.produce.producing import NEVER, SOON, Gate, failure_of

LARGE = 20_000
"""A record of this size is a batch of its own where ``batch_bytes`` is 1."""


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


@pytest.fixture
def log(line: FaultyStore) -> ObjectLog:
    return open_log(line, create=True)


class TestInTime:
    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(auto=False)

    @pytest.fixture
    def log(self, line: FaultyStore, clock: ManualClock) -> ObjectLog:
        return open_log(line, create=True, env=Env(clock=clock))

    def test_a_batch_closes_100_ms_after_its_first_record_by_default(
        self, log: ObjectLog, line: FaultyStore, clock: ManualClock
    ) -> None:
        with log.producer() as producer:
            first = producer.append(value=b"first")
            assert clock.wait_until_blocked(1)
            clock.advance(0.099)
            assert clock.wait_until_blocked(1)
            producer.append(value=b"second")
            assert line.named("put") == ()
            clock.advance(0.001)
            assert first.result(SOON) == Receipt(0, 1)
        assert len(log.head().tail) == 1

    def test_constant_traffic_from_several_threads_does_not_put_off_the_close(
        self, log: ObjectLog, clock: ManualClock
    ) -> None:
        with log.producer() as producer:
            first = producer.append(value=b"first")

            def append_until_it_is_listed() -> None:
                while not first.done():
                    producer.append(value=b"more")

            def let_the_time_pass() -> None:
                clock.advance(0.05)
                producer.append(value=b"more")
                clock.advance(0.05)  # and then it stands still
                first.result(SOON)

            together(let_the_time_pass, *[append_until_it_is_listed] * 3)
            assert first.result(0) == Receipt(0, 1)

    def test_no_batch_spans_more_than_its_linger_time_with_any_number_of_threads(
        self, log: ObjectLog, clock: ManualClock
    ) -> None:
        stop, table = threading.Event(), pa.table({"value": [b"t", b"t"]})
        calls = [threading.Lock() for _ in range(3)]  # each held during a call of one thread: no time passes in a call
        allowed, made = [0, 0, 0], [0, 0, 0]
        with log.producer(batch_bytes=150_000, linger=1 / 8, compression="none") as producer:

            def append_what_is_allowed(thread: int) -> None:
                try:
                    while not stop.is_set():
                        if made[thread] == allowed[thread]:
                            stop.wait(0.0005)
                            continue
                        with calls[thread]:
                            if made[thread] % 500:
                                producer.append(value=b"r")
                            else:
                                producer.append_batch(table)
                        made[thread] += 1
                finally:
                    stop.set()  # also if it failed: nobody waits for it then

            def let_the_time_pass() -> None:
                for step in range(60):
                    with calls[0], calls[1], calls[2]:
                        clock.advance(1 / 64)  # sums of it are exact
                    # Few, so that batches are closed by their time; and now and then more than a batch holds.
                    for thread in range(3):
                        allowed[thread] += 40 if step % 20 else 3000
                    # No more time passes until what is due is closed, and everybody has appended at this time.
                    while producer._state.until_due() == 0.0 or made != allowed:
                        # The thread that closes batches may have begun to wait, for so long, just after the time moved:
                        # then it waits for a time that does not come.
                        producer._state.wake.set()
                        if stop.wait(0.001):
                            return
                stop.set()

            together(let_the_time_pass, *[lambda thread=thread: append_what_is_allowed(thread) for thread in range(3)])
        ages = [entry.newest - entry.oldest for entry in log.head().tail]
        assert len(ages) > 5
        # At the time itself it may be closed before or after others have appended.
        assert max(ages) in (109_375, 125_000), "it is kept open for so long, and no longer"

    def test_the_time_counts_from_the_append_even_if_it_is_noticed_late(
        self, log: ObjectLog, clock: ManualClock
    ) -> None:
        with log.producer(linger=5.0) as producer:
            with producer._state.lock:  # what closes batches has to wait
                handle = producer.append(value=b"a")
                clock.advance(5.0)
            assert handle.result(SOON) == Receipt(0, 1)

    def test_a_record_that_came_while_a_batch_was_closed_is_not_forgotten(
        self, log: ObjectLog, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with log.producer(linger=5.0) as producer:
            drain, late = producer._state.drain, []

            def drain_and_then_one_more_is_queued() -> None:
                drain()
                if not late:
                    late.append(producer.append(value=b"b"))

            first = producer.append(value=b"a")
            while producer._state.wake.is_set():
                threading.Event().wait(0.001)
            assert clock.wait_until_blocked(1)  # what closes batches has taken notice of the first, and sleeps
            monkeypatch.setattr(producer._state, "drain", drain_and_then_one_more_is_queued)
            producer.flush(SOON)
            assert first.result(0) == Receipt(0, 1)
            assert not late[0].done()
            clock.advance(5.0)
            assert late[0].result(SOON) == Receipt(1, 1)

    def test_a_listing_that_takes_long_does_not_delay_the_next_close_or_its_upload(
        self, log: ObjectLog, line: FaultyStore, clock: ManualClock
    ) -> None:
        listing, uploads = Gate(line, "head"), Gate(line, "batches/")
        uploads.open()
        with log.producer(linger=5.0) as producer:
            first = producer.append(value=b"a")
            clock.advance(5.0)
            listing.wait_for(1)
            second = producer.append(value=b"b")
            clock.advance(5.0)
            uploads.wait_for(2)
            assert not first.done()
            listing.open()
            assert [first.result(SOON), second.result(SOON)] == [Receipt(0, 1), Receipt(1, 1)]


class TestSize:
    def test_a_batch_closes_at_64_mebibytes_by_default(self, log: ObjectLog) -> None:
        table = records(bytes(1 << 20))
        with log.producer(linger=NEVER) as producer:
            handles = [producer.append_batch(table) for _ in range(65)]
            handles[0].result(SOON)
        assert [entry.count for entry in log.head().tail] in ([63, 2], [64, 1])

    @pytest.mark.matrix
    def test_256_mebibytes_are_held_by_default(self, log: ObjectLog, line: FaultyStore) -> None:
        gate, table = Gate(line), records(bytes(16 << 20))
        with log.producer(block=False, compression="none") as producer:
            try:
                for _ in range(16):
                    producer.append_batch(table)
                with pytest.raises(BufferFull, match="268,435,456"):
                    producer.append_batch(table)
            finally:
                gate.open()

    def test_threads_that_append_at_once_exceed_the_budget_by_one_call_at_most(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        gate, table = Gate(line), records(bytes(30_000))
        with log.producer(budget=100_000, batch_bytes=1, compression="none") as producer:
            threads = [threading.Thread(target=producer.append_batch, args=(table,)) for _ in range(12)]
            with producer._state.lock:
                for thread in threads:
                    thread.start()
            gate.wait_for(4)
            while producer.buffered < 135_000 and len(producer._state.room._waiters) < 8:
                threading.Event().wait(0.001)
            highest = producer.buffered
            gate.open()
            for thread in threads:
                thread.join(SOON)
        assert 100_000 <= highest <= 135_000
        assert log.bounds() == Bounds(0, 12)

    def test_appends_that_are_far_ahead_of_an_encoding_wait_for_it(
        self, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        all_appended, encoding, most = threading.Event(), threading.Event(), [0]

        def page_when_all_is_appended(piece: BatchRows) -> pa.RecordBatch:
            if not encoding.is_set():
                encoding.set()
                all_appended.wait(0.5)  # in vain: they wait for this page
            return page_of(piece)

        def append_many() -> None:
            assert encoding.wait(SOON)
            for _ in range(2000):
                producer.append(value=b"a")
                most[0] = max(most[0], len(producer._state.rows))
            all_appended.set()

        with log.producer(linger=NEVER, batch_bytes=6000) as producer:  # pages of 64 records
            producer.append(value=b"a")
            monkeypatch.setattr("strandline.log.produce.state.page_of", page_when_all_is_appended)
            together(producer.flush, append_many)
            monkeypatch.undo()
        assert most[0] < 512
        assert log.bounds() == Bounds(0, 2001)


class TestOverlap:
    @pytest.mark.parametrize(("options", "width"), [({}, 8), ({"uploads": 3}, 3)])
    def test_uploads_overlap(self, log: ObjectLog, line: FaultyStore, options: dict[str, int], width: int) -> None:
        gate = Gate(line)
        with log.producer(batch_bytes=1, linger=NEVER, **options) as producer:
            handles = [producer.append(value=bytes(LARGE)) for _ in range(12)]
            gate.wait_for(width)
            assert len([row for row in line.log if row.path.startswith("batches/")]) == width
            gate.open()
            assert [handle.result(SOON).first for handle in handles] == list(range(12))

    def test_one_conditional_write_lists_all_that_are_ready(self, log: ObjectLog, line: FaultyStore) -> None:
        listing, uploads = Gate(line, "head"), Gate(line, "batches/", stage="after")
        uploads.open()
        before = len(line.named("put_if"))
        with log.producer(batch_bytes=1, linger=NEVER) as producer:
            handles = [producer.append(value=bytes(LARGE))]
            listing.wait_for(1)
            handles += [producer.append(value=bytes(LARGE)) for _ in range(6)]
            uploads.wait_for(7)
            while not all(sent.is_done for sent in producer._state.sent):
                threading.Event().wait(0.001)
            listing.open()
            assert [handle.result(SOON).first for handle in handles] == list(range(7))
        assert len(line.named("put_if")) - before == 2

    def test_batches_are_listed_in_the_order_produced_whichever_upload_ends_first(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        others, uploads = threading.Semaphore(0), []

        def hold_the_first(call: Call) -> None:
            if call.path.startswith("batches/") and call.stage == "before":
                uploads.append(call.number)
                if len(uploads) == 1:
                    for _ in range(4):
                        assert others.acquire(timeout=SOON)
            elif call.path.startswith("batches/") and call.number != uploads[0]:
                others.release()

        line.hook(hold_the_first)
        with log.producer(batch_bytes=1, linger=NEVER) as producer:
            first = producer.append(value=b"0" * LARGE)
            while not uploads:
                threading.Event().wait(0.001)
            handles = [first, *[producer.append(value=b"%d" % number * LARGE) for number in range(1, 5)]]
        assert [handle.result(0).first for handle in handles] == list(range(5))
        assert [value[:1] for _, value in content(log)] == [b"0", b"1", b"2", b"3", b"4"]
        assert [entry.number for entry in log.head().tail] == list(range(5))


class TestConflicts:
    @pytest.mark.matrix
    def test_two_producers_on_one_log_pause_at_random_and_try_again(self) -> None:
        place, clocks = PlainStore(), [ManualClock(), ManualClock()]
        open_log(place, create=True)
        conflicts = [0, 0]

        def work(name: int) -> None:
            log = open_log(place, env=Env(clock=clocks[name], chance=SeededChance(name)))
            with log.producer(batch_bytes=1, linger=0.0) as producer:
                for number in range(150):
                    producer.append(key=b"%d" % name, value=b"%d" % number * LARGE).result(SOON)
                conflicts[name] = producer._state.shipper.lister.cell.conflicts

        together(lambda: work(0), lambda: work(1))
        pauses = [pause for clock in clocks for pause in clock.slept]
        assert sum(conflicts) == len(pauses)
        assert pauses, "they never met"
        assert all(0 < pause <= 1.0 for pause in pauses)
        assert len(set(pauses)) == len(pauses)  # jitter
        log = open_log(place)
        assert log.bounds() == Bounds(0, 300)
        keys = fetched(log.plan(log.start()))["key"].to_pylist()
        assert (keys.count(b"0"), keys.count(b"1")) == (150, 150)

    def test_conflicts_without_end_fail_the_batch_which_can_be_retried(self) -> None:
        place, clock = PlainStore(), ManualClock()
        line = FaultyStore(place)
        other = Lister(place, open_log(place, create=True).log_id, env=SYSTEM).cell
        always = True

        def be_first(call: Call) -> None:
            if always and (call.name, call.stage) == ("put_if", "before"):
                other.update(OpId(CHANCE.uuid()), lambda head: replace(head, listed=head.listed + 1))

        log = open_log(line, env=Env(clock=clock, chance=SeededChance(1)))
        line.hook(be_first)
        producer = log.producer(linger=NEVER)
        handle = producer.append(value=b"a")
        with pytest.raises(Contended, match="64 tries"):
            producer.flush(SOON)
        assert isinstance(failure_of(handle), Contended)
        assert len(clock.slept) == 64
        assert log.bounds() == Bounds(0, 0)
        always = False
        assert producer.retry(SOON) == [Receipt(0, 1)]
        producer.close()


class Crowded(ObjectShipper):
    """One that always sees others list."""

    crowded = True  # type: ignore[assignment]


class TestAmongOthers:
    def test_after_a_lost_race_the_head_is_read_before_it_is_written_until_no_other_writer_lists(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        other = open_log(line._inner)
        with log.producer(linger=NEVER, batch_bytes=1) as producer:

            def reads_of_one_listing() -> int:
                before = len(line.named("get"))
                producer.append(value=bytes(LARGE)).result(SOON)
                return len(line.named("get")) - before

            reads_of_one_listing()
            assert reads_of_one_listing() == 0
            append(other, b"x", number=0)
            assert reads_of_one_listing() == 1  # it lost, and looked
            cell = producer._state.shipper.lister.cell
            append(other, b"x", number=1)
            lost = cell.conflicts
            assert reads_of_one_listing() == 1  # it looked, and did not lose
            assert cell.conflicts == lost
            assert [reads_of_one_listing() for _ in range(18)] == [1] * 16 + [0] * 2

    def test_others_are_left_as_much_time_as_a_listing_takes(self) -> None:
        pace = ListingPace()
        assert pace.rest(0.02, crowded=False) == 0.0
        assert pace.rest(0.03, crowded=True) == 0.03
        assert pace.rest(0.1, crowded=True) == pytest.approx(0.0484)  # twice the shortest of late
        assert [pace.rest(9.0, crowded=True) for _ in range(50)][-1] == 0.25

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(auto=False)

    @pytest.fixture
    def resting(self, line: FaultyStore, clock: ManualClock) -> Iterator[Producer]:
        """A producer that has listed one batch in an eighth of a second, and then leaves others as much time."""
        log = open_log(line, create=True, env=Env(clock=clock))
        lister = Lister(line, log.log_id, env=Env(clock=clock, chance=CHANCE))
        shipper = Crowded(lister, writer=writer_named(1), born=0, compression=Compression.named("none"))
        limits = Limits(linger=NEVER, batch_bytes=1)
        with Producer(shipper, limits, writer=writer_named(1), number=0, env=Env(clock=clock)) as producer:
            listing = Gate(line, "head")
            first = producer.append(value=bytes(LARGE))
            listing.wait_for(1)
            clock.advance(0.125)
            listing.open()
            assert first.result(SOON) == Receipt(0, 1)
            yield producer

    def test_meanwhile_batches_gather_and_are_listed_together(
        self, resting: Producer, line: FaultyStore, clock: ManualClock
    ) -> None:
        handles = [resting.append(value=bytes(LARGE)) for _ in range(3)]
        while not all(sent.is_done for sent in resting._state.sent):
            threading.Event().wait(0.001)
        assert clock.wait_until_blocked(2)
        assert not any(handle.done() for handle in handles)
        before = len(line.named("put_if"))
        clock.advance(0.125)
        assert [handle.result(SOON).first for handle in handles] == [1, 2, 3]
        assert len(line.named("put_if")) == before + 1

    def test_closing_does_not_wait_for_it(self, resting: Producer, clock: ManualClock) -> None:
        last = resting.append(value=bytes(LARGE))
        assert clock.wait_until_blocked(2)
        resting.close()
        assert last.result(0) == Receipt(1, 1)


def raise_generation(log: ObjectLog, *, floor: int) -> None:
    def edit(head: Head) -> Head:
        return replace(head, generation=head.generation + 1, min_generation=floor)

    log._lister.cell.update(OpId(CHANCE.uuid()), edit)


class TestGenerations:
    def test_names_carry_the_generation_of_the_head_last_seen(self, log: ObjectLog, line: FaultyStore) -> None:
        other = open_log(line)
        with log.producer(linger=NEVER) as producer:
            for number in range(3):
                producer.append(value=b"%d" % number)
                producer.flush(SOON)
                raise_generation(other, floor=0)
                append(other, b"x", number=number)
        # The first flush after a rise does not know of it yet, and learns of it when it lists.
        mine = [entry.location.split("/")[1] for entry in log.head().tail if entry.writer == producer.writer]
        assert [int(generation) for generation in mine] == [0, 0, 1]
        assert line.named("get"), "it reads when it has to"

    def test_a_batch_uploaded_before_a_trim_is_uploaded_again_and_listed_once(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        listing = Gate(line, "head")
        with log.producer(linger=NEVER, batch_bytes=1) as producer:
            handles = [producer.append(value=b"%d" % number * LARGE) for number in range(3)]
            listing.wait_for(1)
            raise_generation(open_log(line._inner), floor=1)
            listing.open()
            producer.flush(SOON)
        assert [handle.result(0).first for handle in handles] == [0, 1, 2]
        assert {entry.location.split("/")[1] for entry in log.head().tail} == {f"{1:016d}"}
        assert [value[:1] for _, value in content(log)] == [b"0", b"1", b"2"]


class Opaque(ObjectShipper):
    """Another format's shipper: one that keeps values and nothing else."""

    opaque = True  # type: ignore[misc]


class TestOpaque:
    @pytest.fixture
    def producer(self, log: ObjectLog) -> Producer:
        writer = WriterId(UUID(int=1))
        lister = Lister(log.store, log.log_id, env=SYSTEM)
        shipper = Opaque(lister, writer=writer, born=0, compression=Compression.named("none"))
        return Producer(shipper, Limits(), writer=writer, number=0, env=SYSTEM)

    def test_what_is_only_a_value_is_taken(self, producer: Producer, log: ObjectLog) -> None:
        with producer:
            producer.append(value=b"a", timestamp=5, headers={})
            producer.append(value=b"")
            producer.append_batch(records(b"b", b"c"))
            producer.produce([b"d", b""])
        assert [value for _, value in content(log)] == [b"a", b"", b"b", b"c", b"d", b""]

    @pytest.mark.parametrize(
        "wrong",
        [{"key": b"k"}, {"op": Op.DELETE}, {"headers": {"h": b"x"}}, {"value": None}],
        ids=["a key", "a delete", "headers", "no value"],
    )
    def test_records_with_more_than_a_value_are_refused_at_the_call(
        self, producer: Producer, log: ObjectLog, wrong: dict[str, object]
    ) -> None:
        columns = {"key": None, "op": 0, "headers": None, "value": b"v"} | wrong
        table = record_batch(
            timestamps=[0],
            ops=[int(columns["op"])],
            keys=[columns["key"]],
            values=[columns["value"]],
            headers=[columns["headers"]],
        )
        with producer:
            with pytest.raises(InvalidInput, match="keeps values"):
                producer.append(**{"value": b"v"} | wrong)
            with pytest.raises(InvalidInput, match="keeps values"):
                producer.append_batch(table)
            producer.append(value=b"good")
        assert content(log) == [(0, b"good")]
