"""The supervisor: whatever ends a watch, the next one resumes at the store's cursor."""

import threading

import pytest

from strandline.errors import InvalidInput, StorageError, TransientStorageError
from strandline.followers.events import Batching
from strandline.followers.stores.state import MemoryStore
from strandline.followers.watch.api import Supervisor
from strandline.kv.memory import MemoryKeyValue
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from strandline.testing.clock import ManualClock
from tests.followers.scripted_watch import Stage, at, numbered

PATIENCE = 120.0
QUICK = Backoff(attempts=5, base=0.001, ceiling=0.001)


@pytest.fixture
def kv():
    kv = MemoryKeyValue()
    for number in range(10):
        kv.put(f"k{number}", b"%d" % number)
    return kv


def ignore(batch):
    pass


class Failing:
    """An apply that raises at its first calls."""

    def __init__(self, failures, error=None):
        self.failures, self.error, self.seen = failures, error or RuntimeError("no"), []

    def __call__(self, batch):
        if self.failures:
            self.failures -= 1
            raise self.error
        self.seen.extend(batch)


def run(supervisor, cursor):
    supervisor._on_applied = lambda at: at.next >= cursor and supervisor.halt()
    return supervisor.run()


def test_after_an_error_it_restarts_and_nothing_is_missing_or_doubled(kv):
    apply, store = Failing(3), MemoryStore()
    supervisor = Supervisor(kv, apply, store=store, reader=kv, restarts=QUICK)
    assert run(supervisor, 10).next == 10
    assert [update.version for update in apply.seen] == list(range(10))
    assert dict(store.range()) == {b"k%d" % number: b"%d" % number for number in range(10)}
    assert supervisor.state().phase == "stopped"
    assert supervisor.state().restarts == 3
    assert isinstance(supervisor.state().error, RuntimeError)


def test_a_stream_that_fails_within_each_window_still_gets_further_without_a_store():
    opened, seen = [], []

    class Cut(Stage):
        def watch_from(self, scope, cursor):
            opened.append(cursor)
            first = 0 if cursor is None else cursor.next
            if first == 6:
                supervisor.halt()
            self.script = iter([numbered(first, 2), StorageError("cut off")])
            return self

    stage = Cut()
    supervisor = Supervisor(
        stage, seen.extend, restarts=QUICK, resume=None, env=Env(clock=stage.clock), batching=Batching(window=1e9)
    )
    assert supervisor.run() == at(6)
    assert opened == [None, at(2), at(4), at(6)]
    assert [update.version for update in seen] == list(range(6))
    assert supervisor.state().restarts == 3


def test_a_supervisor_resumes_from_the_stores_cursor_not_from_its_first_argument(kv):
    store = MemoryStore()
    first = Supervisor(kv, ignore, store=store, reader=kv)
    run(first, 10)
    resumed = []
    real = kv.watch_from
    kv.watch_from = lambda scope, cursor: resumed.append(cursor) or real(scope, cursor)
    kv.put("late", b"x")
    apply = Failing(1)
    later = Supervisor(kv, apply, store=store, reader=kv, restarts=QUICK)
    run(later, 11)
    assert [cursor.next for cursor in resumed] == [10, 10]
    assert [update.key for update in apply.seen] == [b"late"]


def test_without_a_store_it_resumes_from_the_last_applied_cursor(kv):
    seen, told = [], []

    def apply(batch):
        if seen and not told:
            told.append("failed once")
            raise RuntimeError("second batch")
        seen.extend(batch)

    def heard(cursor):
        if cursor.next == 10:
            kv.put("late", b"x")
        elif cursor.next == 11:
            supervisor.halt()

    supervisor = Supervisor(kv, apply, on_applied=heard, restarts=QUICK)
    assert supervisor.run().next == 11
    assert [update.version for update in seen] == list(range(11))


def test_a_gap_in_live_delivery_is_repaired_by_a_resync(kv):
    store = MemoryStore()

    def apply(batch):
        # While the first batch is being applied, retention overruns the watch.
        if kv.get("k0") is not None:
            kv.delete("k0")
            kv.put("new", b"n")
            kv.trim(12)

    supervisor = Supervisor(kv, apply, store=store, reader=kv, restarts=QUICK)
    assert run(supervisor, 12).next == 12
    assert dict(store.range()) == {entry.key: entry.value for entry in kv.scan()}
    assert b"k0" not in dict(store.range())


def test_keys_that_were_applied_but_never_stored_are_removed_if_they_vanished_meanwhile(kv):
    state, store = {}, MemoryStore()

    def apply(batch):
        for update in batch:
            if update.value is None:
                state.pop(update.key, None)
            else:
                state[update.key] = update.value
        if b"late" in state:
            # It has been applied. Before it can be stored, it is deleted, forgotten, and the try fails.
            kv.delete("late")
            kv.trim(12)
            raise RuntimeError("died between apply and the store")

    def heard(cursor):
        if cursor.next == 10:
            kv.put("late", b"x")
        else:
            supervisor.halt()

    supervisor = Supervisor(kv, apply, store=store, reader=kv, on_applied=heard, restarts=QUICK)
    supervisor.run()
    assert state == dict(store.range()) == {entry.key: entry.value for entry in kv.scan()}


def test_the_pauses_grow_while_nothing_is_applied_and_begin_again_after_progress(kv):
    clock = ManualClock()
    pauses = []
    real = clock.wait
    clock.wait = lambda event, timeout: (timeout >= 1 and pauses.append(timeout)) or real(event, timeout)
    calls = iter([True, True, True, False, True])

    def apply(batch):
        if next(calls, False):
            raise RuntimeError("not yet")

    class Even:
        def jitter(self):
            return 1.0

    def heard(cursor):
        if cursor.next == 10:
            kv.put("more", b"x")
        else:
            supervisor.halt()

    supervisor = Supervisor(
        kv, apply, on_applied=heard, restarts=Backoff(base=1.0, ceiling=60.0), env=Env(clock=clock, chance=Even())
    )
    supervisor.run()
    assert pauses == [1.0, 2.0, 4.0, 1.0]


def test_an_error_that_repeating_cannot_cure_ends_it(kv):
    supervisor = Supervisor(kv, Failing(1, InvalidInput("never")), restarts=QUICK)
    with pytest.raises(InvalidInput):
        supervisor.run()
    assert supervisor.state().phase == "failed"
    assert supervisor.state().restarts == 0


def test_too_many_failures_without_progress_end_it_with_the_last_error(kv):
    supervisor = Supervisor(kv, Failing(99, TransientStorageError("down")), restarts=QUICK)
    with pytest.raises(StorageError, match="down"):
        supervisor.run()
    assert supervisor.state().phase == "failed"
    assert supervisor.state().restarts == 4


def test_a_supervisor_reports_each_state(kv):
    states = []
    supervisor = Supervisor(kv, Failing(1), restarts=QUICK, on_state=lambda state: states.append(state.phase))
    run(supervisor, 10)
    assert [phase for at, phase in enumerate(states) if at == 0 or states[at - 1] != phase] == [
        "running",
        "waiting",
        "running",
        "stopped",
    ]


def test_in_a_thread_of_its_own_it_stops_in_good_order(kv):
    store = MemoryStore()
    with Supervisor(kv, ignore, store=store, reader=kv) as supervisor:
        assert supervisor.wait_until(lambda state: state.cursor is not None and state.cursor.next == 10, PATIENCE)
        with pytest.raises(InvalidInput):
            supervisor.start()
    assert supervisor.state().phase == "stopped"
    assert store.position().cursor.next == 10


def test_a_stop_during_a_pause_takes_effect_at_once(kv):
    supervisor = Supervisor(kv, Failing(99), restarts=Backoff(base=1000.0, ceiling=1000.0)).start()
    assert supervisor.wait_until(lambda state: state.phase == "waiting", PATIENCE)
    assert supervisor.close(PATIENCE).phase == "stopped"
    assert not any(thread.name == "strandline-watch" for thread in threading.enumerate())


def test_the_end_of_the_stream_ends_it(kv):
    kv.end()
    assert Supervisor(kv, ignore).run().next == 10
