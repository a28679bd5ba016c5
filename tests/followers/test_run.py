"""``follow`` end to end: after any failure and restart, the sink has every record exactly once."""

import contextlib
import random
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import CorruptData, CursorExpired, Diverged, Fenced, InvalidInput, NotFound
from strandline.followers import run as running
from strandline.followers.engine import Engine
from strandline.followers.events import Received, ReportCursor, Signal
from strandline.followers.run import Batching, follow
from strandline.log.memory import MemoryLog
from strandline.log.object import open_log
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.storage.clock import CHANCE
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.retry import Backoff, RetryingStore
from strandline.tables.delta.sink import DeltaSink
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.sinks import DELETE, MemorySink, changes, folded
from tests.matrix_cases import some

SMALL = Batching(records=7)


class Crash(BaseException):
    """The process dies here."""


def writer():
    return WriterId(CHANCE.uuid())


def stream(seed: int, count: int = 60, keys: int = 8):
    dice = random.Random(seed)
    return [(b"%d" % dice.randrange(keys), dice.choice([DELETE, None, b"%d" % number])) for number in range(count)]


def fill(log, rows, per_batch=5):
    name = writer()
    for number, part in enumerate(_cut(rows, per_batch)):
        table = changes(0, *part).drop_columns("offset")
        log.append(table, writer=name, number=number).result()


def _cut(rows, size):
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def applied(sink):
    """The latest values in a memory sink; checks that it has every offset exactly once and in order."""
    rows = sink.rows()
    assert [offset for offset, _, _ in rows] == list(range(len(rows)))
    table = pa.concat_tables(sink.records)
    gone = table["op"].to_pylist()
    return folded([(key, DELETE if op else value) for (_, key, value), op in zip(rows, gone, strict=True)])


@pytest.fixture
def log(tmp_path):
    return open_log(str(tmp_path / "log"), create=True)


def test_a_sink_ends_up_exactly_as_the_log_says(log):
    rows = stream(1)
    fill(log, rows)
    sink = MemorySink()
    assert follow(log, sink, upto="end", batching=SMALL) == log.end()
    assert applied(sink) == folded(rows)
    assert sink.applies > 3


def test_the_room_itself_is_the_function(log):
    sink = MemorySink()
    assert sl.follow(log, sink, upto="end") == log.start()


def test_an_empty_log_leaves_a_newcomer_at_the_beginning(log):
    sink = MemorySink()
    assert follow(log, sink, upto="end") == Cursor(log.log_id, 0)
    assert sink.at == Cursor(log.log_id, 0)


def test_one_record_is_followed(log, tmp_path):
    fill(log, [(b"k", b"v")])
    sink = DeltaSink(str(tmp_path / "table"))
    follow(log, sink, upto="end")
    assert pa.table(DeltaTable(sink.url).to_pyarrow_table())["value"].to_pylist() == [b"v"]


def test_one_huge_record_is_followed(log, tmp_path):
    value = bytes(48 << 20)
    fill(log, [(b"k", value), (b"l", b"small")])
    sink = DeltaSink(str(tmp_path / "table"))
    follow(log, sink, upto="end")
    table = pa.table(DeltaTable(sink.url).to_pyarrow_table()).sort_by("offset")
    assert [len(one) for one in table["value"].to_pylist()] == [48 << 20, 5]


def test_a_newcomer_that_asks_for_now_gets_only_what_comes_from_then_on_also_after_a_restart(log):
    fill(log, stream(2))
    sink = MemorySink()
    begin = follow(log, sink, start="now", upto="end")
    assert begin == log.end()
    fill(log, [(b"new", b"1")])
    follow(log, sink, start="now", upto="end")
    assert [row[1] for row in sink.rows()] == [b"new"]


def test_a_start_that_means_nothing_is_refused(log):
    with pytest.raises(InvalidInput, match="'beginning'"):
        follow(log, MemorySink(), start="middle", upto="end")


@pytest.mark.parametrize("mode", ["latest", "append"])
def test_the_beginning_of_a_trimmed_log_is_expired_and_not_its_middle(tmp_path, mode):
    log, sink = MemoryLog(), DeltaSink(str(tmp_path / "table"), mode=mode)
    fill(log, stream(4))
    log.trim(20)
    with pytest.raises(CursorExpired, match="from 'retained'"):
        follow(log, sink, "s", upto="end")
    assert sink.cursor(log.log_id) is None
    assert log.slots.list() == []


def test_a_follower_from_the_retained_start_begins_there_and_resumes_from_its_cursor():
    log, sink = MemoryLog(), MemorySink()
    fill(log, stream(4))
    log.trim(20)
    follow(log, sink, "s", start="retained", upto=30)
    follow(log, sink, "s", upto="end")
    assert [offset for offset, _, _ in sink.rows()] == list(range(20, 60))


def test_a_sink_with_a_cursor_of_its_own_ignores_start(log):
    rows = stream(3)
    fill(log, rows[:30])
    sink = MemorySink()
    follow(log, sink, upto="end")
    fill(log, rows[30:])
    follow(log, sink, start="now", upto="end")
    assert applied(sink) == folded(rows)


def test_an_expired_cursor_is_raised_and_nothing_is_skipped():
    log, sink = MemoryLog(), MemorySink()
    fill(log, stream(4))
    follow(log, sink, upto=10)
    log.trim(20)
    with pytest.raises(CursorExpired, match="bootstrap"):
        follow(log, sink, upto="end")
    assert sink.at == Cursor(log.log_id, 10)


def test_a_sink_past_the_end_of_the_log_is_diverged(log):
    sink = MemorySink()
    sink.at = Cursor(log.log_id, 5)
    with pytest.raises(Diverged, match="past the log's end"):
        follow(log, sink, upto=9)


def test_a_request_to_stop_applies_what_was_fetched_and_returns():
    log, sink, stop = MemoryLog(), MemorySink(), threading.Event()
    thread = threading.Thread(target=follow, args=(log, sink), kwargs={"stop": stop, "batching": Batching(window=0)})
    thread.start()
    fill(log, stream(5))
    seen = threading.Event()
    end = log.end()
    for _ in range(2000):
        if sink.at == end:
            break
        seen.wait(0.01)
    stop.set()
    thread.join(120)
    assert not thread.is_alive()
    assert sink.at == end


# --- slots -----------------------------------------------------------------------------------------------------


def test_the_slot_follows_the_sinks_own_cursor(log):
    fill(log, stream(6))
    follow(log, MemorySink(), slot="billing", upto=40)
    assert log.slots.get("billing").position == 40
    assert log.slots.floor() == 40


def test_a_sink_that_was_rebuilt_takes_its_slot_back_with_it(log):
    fill(log, stream(3))
    follow(log, MemorySink(), "billing", upto="end")
    assert log.slots.list()[0].position == log.end().next
    floors = []

    class Watching(MemorySink):
        def apply(self, table, *, since, upto):
            floors.append(log.slots.floor())
            super().apply(table, since=since, upto=upto)

    follow(log, Watching(), "billing", upto="end", batching=SMALL)
    assert floors[0] == 0  # what it needs again is pinned before it is read
    assert log.slots.list()[0].position == log.end().next


def test_a_follower_that_has_nothing_to_do_is_still_seen():
    clock = ManualClock()
    log = MemoryLog(env=Env(clock=clock))
    fill(log, stream(3))
    stop, seen = threading.Event(), []

    class Patient(MemoryLog):
        def wait(self, past, timeout):
            clock.advance(20)
            seen.append(self.slots.list()[0].last_seen)
            if len(seen) == 9:
                stop.set()
            return False

    log.__class__ = Patient
    began = clock.now()
    follow(log, MemorySink(), "billing", stop=stop, env=Env(clock=clock))
    assert max(seen) - began >= 100e6


def test_a_second_follower_of_the_same_slot_fences_the_first_which_changes_nothing_more(log):
    fill(log, stream(7))
    first, second = MemorySink(), MemorySink()

    class Slow(MemorySink):
        def apply(self, records, *, since, upto):
            super().apply(records, since=since, upto=upto)
            if records.num_rows and second.at is None:
                follow(log, second, slot="billing", upto=21, batching=SMALL)

    first = Slow()
    with pytest.raises(Fenced):
        follow(log, first, slot="billing", upto="end", batching=SMALL)
    assert log.slots.get("billing").position == 21
    assert first.at.next < 21


# --- stopped hard, everywhere ----------------------------------------------------------------------------------


class CrashingSink:
    """A sink that crashes before or after its n-th apply is stored."""

    def __init__(self, inner, at, *, landed):
        self.inner, self.at, self.landed = inner, at, landed

    def cursor(self, log_id):
        return self.inner.cursor(log_id)

    def apply(self, records, *, since, upto):
        self.at -= 1
        if self.at == 0 and not self.landed:
            raise Crash
        self.inner.apply(records, since=since, upto=upto)
        if self.at == 0:
            raise Crash


def survive(log, sink, *, crashes, seed):
    """Follow with crashes in between, as a supervisor would restart it; returns the floors seen after each crash."""
    dice = random.Random(seed)
    for _ in range(crashes):
        crashing = CrashingSink(sink, dice.randint(1, 6), landed=dice.random() < 0.5)
        with contextlib.suppress(Crash):
            follow(log, crashing, slot="s", upto="end", batching=Batching(records=dice.randint(1, 9)))
        at = sink.cursor(log.log_id)
        for slot in log.slots.list():
            assert slot.position <= (0 if at is None else at.next), "the slot ran ahead of the sink"
    follow(log, sink, slot="s", upto="end")


@pytest.mark.parametrize("seed", some(range(40), 15))
def test_a_follower_stopped_hard_at_any_step_ends_up_exact(seed):
    log, sink = MemoryLog(), MemorySink()
    rows = stream(seed)
    fill(log, rows)
    survive(log, sink, crashes=5, seed=seed)
    assert applied(sink) == folded(rows)
    assert log.slots.get("s").position == len(rows)


@pytest.mark.parametrize("seed", some(range(4), 1))
def test_a_delta_table_under_the_same_treatment_is_exact(tmp_path, seed):
    log, sink = MemoryLog(), DeltaSink(str(tmp_path / "table"))
    rows = stream(seed)
    fill(log, rows)
    survive(log, sink, crashes=4, seed=seed)
    table = pa.table(DeltaTable(sink.url).to_pyarrow_table())
    assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == folded(rows)
    assert len(set(table["key"].to_pylist())) == table.num_rows


class EagerEngine(Engine):
    """A broken twin: it reports on receipt, before the sink has stored anything."""

    def step(self, event, now):
        if isinstance(event, Received):
            self.held = super().step(event, now)
            return ReportCursor(event.upto)
        if event is Signal.NOTHING and self.held is not None:
            held, self.held = self.held, None
            return held
        action = super().step(event, now)
        if event is Signal.STORED and isinstance(action, ReportCursor):
            return super().step(Signal.NOTHING, now)
        return action

    held = None


def test_a_twin_that_advances_before_the_commit_is_caught(monkeypatch):
    monkeypatch.setattr(running, "Engine", EagerEngine)
    original = running.Follower._do

    def do(self, action):
        if isinstance(action, ReportCursor):
            self.slot.advance(action.cursor)
            return Signal.NOTHING
        return original(self, action)

    monkeypatch.setattr(running.Follower, "_do", do)

    def forty_seeds():
        for seed in range(40):
            log = MemoryLog()
            fill(log, stream(seed))
            survive(log, MemorySink(), crashes=5, seed=seed)

    with pytest.raises(AssertionError, match="ran ahead"):
        forty_seeds()


class ByRunSink(MemorySink):
    """Broken: identifies a batch by its number within the run, not by its offsets."""

    def __init__(self):
        super().__init__()
        self.batches = 0
        self.seen = set()

    def apply(self, records, *, since, upto):
        self.batches += 1
        if (self.batches, since.next) in self.seen:
            return
        self.seen.add((self.batches, since.next))
        self.records.append(records)
        self.at = upto


def test_a_twin_that_keys_by_batch_number_is_caught():
    log, sink = MemoryLog(), ByRunSink()
    rows = stream(1)
    fill(log, rows)
    follow(log, sink, upto=20, batching=SMALL)
    cursor = sink.at
    sink.apply(changes(10, *rows[10:20]), since=cursor.at(10), upto=cursor)  # delivered again, in another cut
    follow(log, sink, upto="end", batching=SMALL)
    with pytest.raises(AssertionError):
        applied(sink)


# --- damage and outages ----------------------------------------------------------------------------------------


def damaged(log, tmp_path, number, how):
    batch = Path(tmp_path, "log", log.head().tail[number].location)
    how(batch)
    return batch.name


def test_a_corrupt_batch_is_named_and_the_sink_stays_before_it(log, tmp_path):
    fill(log, stream(8))
    name = damaged(log, tmp_path, 3, lambda path: path.write_bytes(path.read_bytes()[:-20] + b"\0" * 20))
    sink = MemorySink()
    with pytest.raises(CorruptData, match=name):
        follow(log, sink, slot="s", upto="end", batching=Batching(records=5))
    assert sink.at == Cursor(log.log_id, 15)
    assert log.slots.get("s").position == 15


def test_a_missing_batch_is_named_and_the_sink_stays_before_it(log, tmp_path):
    fill(log, stream(9))
    name = damaged(log, tmp_path, 3, Path.unlink)
    sink = MemorySink()
    with pytest.raises(NotFound, match=f"{name} is missing .*offsets 15 to 19"):
        follow(log, sink, slot="s", upto="end", batching=Batching(records=5))
    assert sink.at == Cursor(log.log_id, 15)


def test_a_store_that_is_down_for_a_while_is_waited_for(tmp_path):
    clock = ManualClock(auto=True)
    faulty = FaultyStore(LocalStore(str(tmp_path / "log")), clock=clock)
    log = open_log(
        RetryingStore(faulty, env=Env(clock=clock), backoff=Backoff(attempts=20)), create=True, env=Env(clock=clock)
    )
    rows = stream(10)
    fill(log, rows)
    faulty.fail_next("get", times=9)
    sink = MemorySink()
    follow(log, sink, upto="end", env=Env(clock=clock))
    assert applied(sink) == folded(rows)
