"""The key-value store on a log: the contract, and its own rules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pyarrow as pa
import pytest

from strandline.errors import (
    AlreadyExists,
    CommitTimedOut,
    Conflict,
    Contended,
    CursorExpired,
    Diverged,
    Gap,
    InvalidInput,
    NotFound,
    NotReady,
    NullKey,
    OutcomeUnknown,
    StrandlineError,
)
from strandline.followers.run import follow
from strandline.followers.stores.rocks import RocksStore
from strandline.followers.stores.state import MemoryStore
from strandline.kv.contract import KeyValueSubscription, Listed
from strandline.kv.log import LogKeyValue
from strandline.log.contract import Log
from strandline.log.memory import MemoryLog
from strandline.log.object import open_log
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.keyed import EVERYTHING, Prefix, Update, Updates
from strandline.model.records import READ_SCHEMA, Op, record_batch
from strandline.model.stamp import OpId
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import together
from tests.contracts.key_values import Collected, KeyValueContract, churn

ROOT = Path(__file__).resolve().parents[2]


def trim(log: Log, offset: int) -> None:
    if isinstance(log, MemoryLog):
        log.trim(offset)
    else:
        log._lister.cell.update(OpId(uuid4()), lambda head: replace(head, floor=offset))


def write(log: Log, *rows: tuple[bytes | None, bytes | None], op: Op = Op.PUT) -> None:
    """Append one batch to the log of a key-value store, as any producer may."""
    batch = record_batch(
        timestamps=[0] * len(rows), ops=[op] * len(rows), keys=[key for key, _ in rows], values=[v for _, v in rows]
    )
    log.append(batch, writer=WriterId(uuid4()), number=0).result()


class LogBucketContract(KeyValueContract):
    def recreate(self, kv: LogKeyValue) -> LogKeyValue:
        raise NotImplementedError

    def expire(self, kv: LogKeyValue) -> None:
        trim(kv._log, min(entry.version for entry in kv.scan()))

    def overrun(self, kv: LogKeyValue, subscription: KeyValueSubscription) -> list[Update]:
        made = churn(kv, 20)
        trim(kv._log, made[-3].version)
        return made


@pytest.mark.matrix
class TestOnAMemoryLog(LogBucketContract):
    @pytest.fixture
    def kv(self) -> LogKeyValue:
        return LogKeyValue(MemoryLog())

    def recreate(self, kv: LogKeyValue) -> LogKeyValue:
        return LogKeyValue(MemoryLog())


class TestOnAnObjectLog(LogBucketContract):
    rounds = 60

    @pytest.fixture
    def kv(self) -> LogKeyValue:
        return LogKeyValue(open_log(FaultyStore(PlainStore()), create=True))

    def recreate(self, kv: LogKeyValue) -> LogKeyValue:
        return LogKeyValue(open_log(PlainStore(), create=True))

    def failing_listings(self, kv: LogKeyValue) -> AbstractContextManager[object] | None:
        fresh = LogKeyValue(kv._log)
        kv._fold = fresh._fold  # one that has still to read all of it
        return kv._log.store.down()


@pytest.mark.matrix
class TestInAFolder(LogBucketContract):
    rounds = 40

    @pytest.fixture
    def kv(self, tmp_path: Path) -> LogKeyValue:
        return LogKeyValue(open_log(str(tmp_path / "log"), create=True))

    def recreate(self, kv: LogKeyValue) -> LogKeyValue:
        return LogKeyValue(open_log(kv._log.url + "-anew", create=True))


@pytest.fixture(params=["memory", "object"])
def log(request: pytest.FixtureRequest) -> Log:
    return MemoryLog() if request.param == "memory" else open_log(PlainStore(), create=True)


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


def on_line(line: FaultyStore, *, create: bool = False) -> LogKeyValue:
    clock = ManualClock()
    return LogKeyValue(open_log(line, create=create, env=Env(clock=clock)), env=Env(clock=clock))


# --- reading ---------------------------------------------------------------------------------------------------


def test_a_version_is_the_offset_and_the_cursor_is_after_it(log: Log) -> None:
    kv = LogKeyValue(log)
    assert [kv.put(key, b"1") for key in (b"a", b"b", b"a")] == [0, 1, 2]
    assert kv.entry(b"a").version == 2
    with kv.watch() as watch:
        assert watch.take(1, 0).upto == Cursor(log.log_id, 2)
        assert watch.take(9, 0).upto == Cursor(log.log_id, 3)
        assert watch.take(9, 0) == Listed(Cursor(log.log_id, 3))


def test_a_read_sees_what_another_key_value_store_was_answered_before(log: Log) -> None:
    one, other = LogKeyValue(log), LogKeyValue(log)
    for number in range(5):
        version = one.put(b"a", b"%d" % number)
        assert other.get(b"a") == b"%d" % number
        assert other.entry(b"a").version == version
    one.delete(b"a")
    assert other.keys() == []


def test_batches_of_any_producer_are_read_in_their_order(log: Log) -> None:
    kv = LogKeyValue(log)
    write(log, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
    write(log, (b"b", None), op=Op.DELETE)
    write(log, (b"c", b"1"), (b"c", b"2"))
    assert [tuple(entry) for entry in kv.scan()] == [(b"a", b"2", 2), (b"c", b"2", 5)]


def test_a_null_value_is_the_empty_one_and_a_removal_has_none(log: Log) -> None:
    kv = LogKeyValue(log)
    write(log, (b"a", None), (b"b", b"1"))
    write(log, (b"b", b"a value that a removal has no use for"), op=Op.DELETE)
    assert kv.get(b"a") == b""
    assert kv.keys() == [b"a"]
    for since in (0, 2):
        with kv.watch_from(EVERYTHING, Cursor(log.log_id, since)) as watch:
            rows = list(watch.take(9, 0))
        whole = [(Op.PUT, b"a", b"", 0), (Op.PUT, b"b", b"1", 1), (Op.DELETE, b"b", None, 2)]
        assert [tuple(row) for row in rows] == whole[since:]


@pytest.mark.parametrize("scope", [EVERYTHING, Prefix("a")])
def test_a_record_without_key_is_refused_by_name(log: Log, scope: Prefix) -> None:
    kv = LogKeyValue(log)
    write(log, (b"a", b"1"), (b"b", b"1"))
    with kv.watch(scope) as watch:
        Collected(watch).until_listed()
        write(log, (b"a", b"1"), (None, b"1"))
        for read in (kv.keys, lambda: kv.get(b"a"), kv.watch, lambda: watch.take(9, 0)) * 2:
            with pytest.raises(NullKey, match="offset 3 has no key"):
                read()


def test_a_log_evicts_nothing_so_that_its_listing_needs_no_deleted_keys(log: Log) -> None:
    kv = LogKeyValue(log)
    kv.put(b"a", b"1")
    kv.put(b"b", b"1")
    kv.delete(b"a")
    assert kv.listing().live == {b"b"}
    assert kv.listing().deleted is None


def test_its_own_writes_are_not_read_back(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    kv.keys()
    for number in range(20):
        kv.put(b"%d" % number, b"1")
    kv.update(b"3", b"2", 3)
    kv.delete(b"4")
    assert len(kv.keys()) == 19
    assert not [row for row in line.named("get") if row.path.startswith("batches/")]
    assert LogKeyValue(open_log(line)).keys() == kv.keys()


def test_its_own_writes_do_not_hide_earlier_writes_of_others(log: Log) -> None:
    kv, other = LogKeyValue(log), LogKeyValue(log)
    kv.put(b"a", b"1")
    assert kv.keys() == [b"a"]
    other.put(b"b", b"1")
    kv.put(b"c", b"1")
    assert kv.keys() == [b"a", b"b", b"c"]


# --- writing under a condition ---------------------------------------------------------------------------------


def test_of_many_threads_and_key_value_stores_that_create_a_key_exactly_one_succeeds(log: Log) -> None:
    kvs = [LogKeyValue(log) for _ in range(3)]
    won: list[tuple[int, bytes]] = []

    def race(kv: LogKeyValue, name: bytes) -> Callable[[], None]:
        def run() -> None:
            for key in range(10):
                try:
                    kv.create(b"%d" % key, name)
                    won.append((key, name))
                except AlreadyExists:
                    pass

        return run

    together(*(race(kv, b"%d.%d" % (index, copy)) for index, kv in enumerate(kvs) for copy in range(2)))
    assert sorted(key for key, _ in won) == list(range(10))
    assert {(int(entry.key), entry.value) for entry in LogKeyValue(log).scan()} == set(won)
    assert log.bounds().next == 10


def test_counting_up_under_versions_loses_no_step(log: Log) -> None:
    kvs = [LogKeyValue(log), LogKeyValue(log)]
    kvs[0].put(b"count", b"0")

    def count(kv: LogKeyValue) -> Callable[[], None]:
        def run() -> None:
            done = 0
            while done < 15:
                at = kv.entry(b"count")
                try:
                    kv.update(b"count", b"%d" % (int(at.value) + 1), at.version)
                    done += 1
                except Conflict:
                    pass

        return run

    together(*(count(kv) for kv in (*kvs, *kvs)))
    assert kvs[0].get(b"count") == b"60"


CREATOR = """
    import sys
    from strandline.kv.log import LogKeyValue
    from strandline.log.object import open_log
    from strandline.errors import AlreadyExists

    place, name = sys.argv[1:]
    kv = LogKeyValue(open_log(place))
    print("ready", flush=True)
    sys.stdin.readline()
    for key in range(20):
        try:
            kv.create(str(key), name.encode())
        except AlreadyExists:
            continue
        print(key, flush=True)
"""


@pytest.mark.matrix
def test_of_several_processes_that_create_a_key_exactly_one_succeeds(tmp_path: Path) -> None:
    place = str(tmp_path / "log")
    kv = LogKeyValue(open_log(place, create=True))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CREATOR), place, f"process {index}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        for index in range(2)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = [racer.communicate(timeout=600)[0].split() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert sorted(map(int, won[0] + won[1])) == list(range(20))
    owners = {entry.key.decode(): entry.value.decode() for entry in kv.scan()}
    assert owners == {key: f"process {index}" for index, keys in enumerate(won) for key in keys}


def test_a_plain_put_never_fails_for_the_sake_of_a_condition_beside_it(log: Log) -> None:
    kv = LogKeyValue(log)
    kv.create(b"taken", b"1")
    refused: list[bytes] = []

    def create(key: bytes) -> None:
        try:
            kv.create(key, b"2")
        except AlreadyExists:
            refused.append(key)

    together(
        *(lambda number=number: kv.put(b"put.%d" % number, b"1") for number in range(4)),
        *(lambda: create(b"taken") for _ in range(4)),
    )
    assert refused == [b"taken"] * 4
    assert kv.keys(b"put.") == [b"put.%d" % number for number in range(4)]
    assert kv.get(b"taken") == b"1"


def test_concurrent_writes_of_threads_share_an_append(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    inside, release = threading.Event(), threading.Event()

    def hold(call: Call) -> None:
        if call.name == "put" and call.stage == "before" and not inside.is_set():
            inside.set()
            release.wait(120)

    line.hook(hold)
    versions: dict[bytes, int] = {}

    def put(key: bytes) -> None:
        versions[key] = kv.put(key, b"1")

    first = threading.Thread(target=put, args=[b"first"])
    first.start()
    assert inside.wait(120)
    others = [threading.Thread(target=put, args=[b"%d" % number]) for number in range(8)]
    for other in others:
        other.start()
    while len(kv._waiting) < 8:
        threading.Event().wait(0.001)
    release.set()
    for thread in (first, *others):
        thread.join(120)
    assert len([row for row in line.named("put") if row.path.startswith("batches/")]) == 2
    assert sorted(versions.values()) == list(range(9))
    assert {entry.key: entry.version for entry in LogKeyValue(open_log(line)).scan()} == versions


def test_changes_of_one_group_are_decided_one_after_the_other(log: Log) -> None:
    kv = LogKeyValue(log)
    outcomes: list[object] = []

    def attempt(change: Callable[[], int]) -> None:
        try:
            outcomes.append(change())
        except AlreadyExists:
            outcomes.append("refused")

    kv._busy = True  # so that all of them wait, and go together
    threads = [
        threading.Thread(target=attempt, args=[lambda: kv.create(b"k", b"1")]),
        threading.Thread(target=attempt, args=[lambda: kv.create(b"k", b"2")]),
        threading.Thread(target=attempt, args=[lambda: kv.create(b"other", b"3")]),
    ]
    for count, thread in enumerate(threads):
        thread.start()
        while len(kv._waiting) <= count:
            threading.Event().wait(0.001)
    with kv._turn:
        kv._busy = False
        kv._turn.notify_all()
    for thread in threads:
        thread.join(120)
    assert sorted(outcomes, key=str) == [0, 1, "refused"]
    assert [tuple(entry) for entry in kv.scan()] == [(b"k", b"1", 0), (b"other", b"3", 1)]
    assert log.bounds().next == 2


def test_a_condition_is_decided_again_when_someone_else_was_faster(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    version = kv.put(b"a", b"1")
    rival = LogKeyValue(open_log(line._inner))
    rounds = 3

    def meddle(call: Call) -> None:
        nonlocal rounds
        if call.name == "put_if" and call.stage == "before" and rounds:
            rounds -= 1
            rival.put(b"b", b"%d" % rounds)

    line.hook(meddle)
    assert kv.update(b"a", b"2", version) == 4
    assert [kv.get(b"a"), kv.get(b"b")] == [b"2", b"0"]

    rounds = 1
    line.unhook()
    line.hook(lambda call: rival.put(b"a", b"stolen") if call.name == "put_if" and call.stage == "before" else None)
    with pytest.raises(Conflict, match="not at version 4"):
        kv.update(b"a", b"3", 4)
    assert kv.get(b"a") == b"stolen"


def test_a_writer_that_always_loses_gets_contended_and_has_changed_nothing(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    rival = LogKeyValue(open_log(line._inner))
    line.hook(lambda call: rival.put(b"b", b"1") if call.name == "put_if" and call.stage == "before" else None)
    with pytest.raises(Contended, match="nothing was changed"):
        kv.create(b"a", b"1")
    line.unhook()
    assert kv.get(b"a") is None
    kv.create(b"a", b"2")
    assert rival.get(b"a") == b"2"


@pytest.mark.parametrize("bad", [None, "text", 7])
def test_a_value_that_no_record_can_hold_is_refused_before_it_spoils_the_log(log: Log, bad: object) -> None:
    kv = LogKeyValue(log)
    for call in (lambda: kv.put(b"a", bad), lambda: kv.create(b"a", bad), lambda: kv.update(b"a", bad, 0)):
        with pytest.raises(InvalidInput):
            call()
    if not isinstance(bad, str):
        for call in (lambda: kv.put(bad, b"1"), lambda: kv.delete(bad), lambda: kv.purge(bad)):
            with pytest.raises(InvalidInput):
                call()
    assert log.bounds().next == 0


# --- lost answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["put", "put_if"])
@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_lost_answer_neither_doubles_a_change_nor_misreports_it(line: FaultyStore, kind: str, fault: str) -> None:
    kv = on_line(line, create=True)
    expected = 0
    for change in (
        lambda: kv.put(b"a", b"1"),
        lambda: kv.create(b"b", b"1"),
        lambda: kv.update(b"b", b"2", 1),
        lambda: kv.delete_with_version(b"b", 2),
        lambda: kv.create(b"b", b"3"),
    ):
        line.fail_next(kind, after=fault == "after", times=3)
        assert change() in (expected, None)
        expected += 1
    assert kv._log.bounds().next == expected
    assert [tuple(entry) for entry in on_line(line).scan()] == [(b"a", b"1", 0), (b"b", b"3", 4)]


class Forgetful:
    """A log that appends, and loses the answers of some appends."""

    def __init__(self, inner: Log) -> None:
        self.inner = inner
        self.lost = 0
        self.error: StrandlineError = OutcomeUnknown("The answer was lost.")

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def append(self, *args: object, **options: object) -> object:
        handle = self.inner.append(*args, **options)
        if self.lost:
            self.lost -= 1
            raise self.error
        return handle


def test_an_append_that_landed_without_an_answer_is_recognised_when_it_is_repeated(log: Log) -> None:
    forgetful = Forgetful(log)
    kv = LogKeyValue(forgetful, env=Env(clock=ManualClock()))
    forgetful.lost = 3
    assert kv.put(b"a", b"1") == 0
    forgetful.lost = 3
    assert kv.create(b"b", b"1") == 1
    forgetful.lost = 3
    assert kv.update(b"b", b"2", 1) == 2
    forgetful.lost = 3
    kv.delete_with_version(b"b", 2)
    assert log.bounds().next == 4
    assert kv.keys() == [b"a"]


def test_an_answer_that_stays_lost_is_an_unknown_outcome_and_its_number_is_never_used_again(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    kv.put(b"a", b"1")
    line.lose_answers(1, path_prefix="head")
    down = False

    def cut(call: Call) -> None:
        nonlocal down
        if call.name == "put_if" and call.stage == "after" and not down:
            down = True
            line.turn_down()

    line.hook(cut)
    with pytest.raises(OutcomeUnknown, match="read the key before you repeat it"):
        kv.put(b"b", b"it landed")
    line.unhook()
    line.heal()
    assert kv.put(b"c", b"not taken for the one before") == 2
    assert [entry.key for entry in on_line(line).scan()] == [b"a", b"b", b"c"]


def test_a_change_whose_commit_timed_out_is_not_taken_for_the_next_one(log: Log) -> None:
    forgetful = Forgetful(log)
    kv = LogKeyValue(forgetful, env=Env(clock=ManualClock()))
    forgetful.lost, forgetful.error = 1, CommitTimedOut("It is durable on the primary only.")
    with pytest.raises(StrandlineError, match="durable on the primary"):
        kv.put(b"a", b"1")
    at = kv.put(b"b", b"2")
    assert at == log.bounds().next - 1
    assert kv.get(b"b") == LogKeyValue(log).get(b"b") == b"2"


def test_a_change_that_never_landed_is_not_made_later(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    kv.put(b"a", b"1")
    with line.down(), pytest.raises(OutcomeUnknown):
        kv.put(b"a", b"2")
    on_line(line).put(b"a", b"3")
    kv.put(b"b", b"1")
    assert kv.get(b"a") == b"3"


@pytest.mark.matrix
def test_a_writer_that_the_log_has_forgotten_continues_under_a_new_name(log: Log) -> None:
    kv = LogKeyValue(log)
    kv.put(b"a", b"1")
    for _ in range(MAX_WRITERS + 1):
        write(log, (b"others", b"1"))
    at = log.bounds().next
    assert kv.put(b"a", b"2") == at
    assert kv.create(b"b", b"1") == at + 1
    assert kv.get(b"a") == b"2"


def test_a_crash_in_the_middle_of_an_append_leaves_a_key_value_store_that_works(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    kv.put(b"a", b"1")
    for after in (False, True):
        crashed = False

        def crash(call: Call, after: bool = after) -> None:
            nonlocal crashed
            if call.name == "put_if" and (call.stage == "after") is after and not crashed:
                crashed = True
                raise Crash

        line.hook(crash)
        with pytest.raises(Crash):
            kv.put(b"after" if after else b"before", b"1")
        line.unhook()
        kv.put(b"a", b"2")
    assert kv.keys() == [b"a", b"after"]


def test_a_change_whose_caller_was_interrupted_while_it_waited_is_never_made(line: FaultyStore) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    kv = on_line(line, create=True)
    before = signal.signal(signal.SIGUSR1, interrupt)
    main, inside, gone = threading.main_thread().ident, threading.Event(), threading.Event()

    def hold(call: Call) -> None:
        if call.name == "put" and call.stage == "before":
            line.unhook()
            inside.set()
            while not kv._waiting:
                gone.wait(0.001)
            signal.pthread_kill(main, signal.SIGUSR1)
            gone.wait(120)

    line.hook(hold)
    writer = threading.Thread(target=kv.put, args=[b"a", b"1"])
    try:
        writer.start()
        assert inside.wait(120)
        with pytest.raises(Interrupted):
            kv.put(b"b", b"1")
    finally:
        gone.set()
        writer.join(120)
        signal.signal(signal.SIGUSR1, before)
    kv.put(b"c", b"1")
    assert kv.keys() == [b"a", b"c"]


# --- watching --------------------------------------------------------------------------------------------------


def test_changes_stay_arrow_until_someone_looks(log: Log) -> None:
    kv = LogKeyValue(log)
    start = Cursor(log.log_id, 0)
    write(log, *((b"node.%d" % number, b"1") for number in range(10)), (b"other", b"1"))
    write(log, (b"node.x", b"2"))
    for scope, most in ((EVERYTHING, 100), (Prefix("node."), 100), (Prefix("node."), 4)):
        with kv.watch_from(scope, start) as watch:
            taken = watch.take(most, 0)
            assert isinstance(taken, Updates)
            assert taken.columnar
            assert len(taken) <= most
            assert taken.columnar
            assert taken.table().schema == READ_SCHEMA


def test_a_take_is_cut_within_a_batch_and_continues_after_it(log: Log) -> None:
    kv = LogKeyValue(log)
    write(log, *((b"node.%d" % number, b"1") for number in range(10)), (b"other", b"1"))
    with kv.watch_from(Prefix("node."), Cursor(log.log_id, 0)) as watch:
        sizes, ends = [], []
        while (taken := watch.take(4, 0)) is not None:
            sizes.append(len(taken))
            ends.append(taken.upto.next)
    assert (sizes, ends) == ([4, 4, 2], [4, 8, 11])


def test_small_batches_are_given_together(log: Log) -> None:
    kv = LogKeyValue(log)
    for number in range(20):
        kv.put(b"%d" % number, b"1")
    with kv.watch_from(EVERYTHING, Cursor(log.log_id, 0)) as watch:
        taken = watch.take(15, 0)
        assert (len(taken), taken.upto.next) == (15, 15)
        taken = watch.take(15, 0)
        assert (len(taken), taken.upto.next) == (5, 20)
        assert watch.take(15, 0) is None


def test_resuming_reads_nothing_before_the_cursor(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    for number in range(30):
        kv.put(b"%d" % number, b"1")
    before = len(line.named("get"))
    with on_line(line).watch_from(EVERYTHING, Cursor(kv.stream, 27)) as watch:
        assert [row.version for row in watch.take(100, 0)] == [27, 28, 29]
    assert len([row for row in line.named("get")[before:] if row.path.startswith("batches/")]) == 3


def test_a_fetch_that_fails_leaves_the_watch_where_it_was(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    for number in range(6):
        kv.put(b"%d" % number, b"1")
    with LogKeyValue(open_log(line)).watch_from(EVERYTHING, Cursor(kv.stream, 0)) as watch:
        batches = 0

        def fail(call: Call) -> None:
            nonlocal batches
            if call.path.startswith("batches/") and call.stage == "before":
                batches += 1
                if batches == 3:
                    raise NotFound("It is hidden for a moment.")

        line.hook(fail)
        assert [row.version for row in watch.take(100, 0)] == [0, 1]
        assert [row.version for row in watch.take(100, 0)] == [2, 3, 4, 5]


def test_a_missing_object_that_was_not_trimmed_is_damage_and_no_gap(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    kv.put(b"a", b"1")
    (batch,) = line._inner.list("batches/")
    line._inner.delete(batch.path)
    with on_line(line).watch_from(EVERYTHING, Cursor(kv.stream, 0)) as watch, pytest.raises(NotFound):
        watch.take(9, 0)
    with pytest.raises(NotFound):
        on_line(line).keys()


def test_an_object_that_was_trimmed_and_deleted_between_plan_and_fetch_is_a_gap(line: FaultyStore) -> None:
    kv = on_line(line, create=True)
    for number in range(4):
        kv.put(b"%d" % number, b"1")
    fresh = on_line(line)

    def trim_meanwhile(call: Call) -> None:
        if call.path.startswith("batches/") and call.stage == "before" and kv._log.bounds().first == 0:
            trim(kv._log, 2)
            for batch in list(line._inner.list("batches/")):
                line._inner.delete(batch.path)

    line.hook(trim_meanwhile)
    with fresh.watch_from(EVERYTHING, Cursor(kv.stream, 0)) as watch:
        for _ in range(3):
            with pytest.raises(Gap, match="trimmed to offset 2"):
                watch.take(9, 0)


def test_a_closed_watch_gives_nothing(log: Log) -> None:
    kv = LogKeyValue(log)
    watch = kv.watch()
    watch.close()
    with pytest.raises(InvalidInput, match="closed"):
        watch.take(1, 0)
    with kv.watch() as watch, pytest.raises(InvalidInput, match="most is a whole number from 1"):
        watch.take(0, 0)


def test_a_cursor_past_the_end_or_of_another_log_is_expired(log: Log) -> None:
    kv = LogKeyValue(log)
    kv.put(b"a", b"1")
    for cursor, why in ((Cursor(log.log_id, 2), "past the log's end"), (Cursor(uuid4(), 0), "belongs to log")):
        with pytest.raises(CursorExpired, match=why):
            kv.watch_from(EVERYTHING, cursor)


# --- trimmed logs ----------------------------------------------------------------------------------------------


def reads(kv: LogKeyValue) -> Iterator[Callable[[], object]]:
    yield from (kv.keys, kv.scan, kv.listing, kv.watch, lambda: kv.get(b"a"))
    yield from (lambda: kv.entry(b"a"), lambda: kv.watch_from(EVERYTHING, None))
    yield from (lambda: kv.create(b"new", b"1"), lambda: kv.update(b"a", b"1", 0))


def test_without_a_base_a_trimmed_log_is_never_read_in_part(log: Log) -> None:
    LogKeyValue(log).put(b"a", b"1")
    LogKeyValue(log).put(b"b", b"1")
    trim(log, 1)
    kv = LogKeyValue(log)
    for read in reads(kv):
        with pytest.raises(CursorExpired, match="a store made from a snapshot as its base"):
            read()
    assert log.bounds().next == 2
    assert kv.put(b"c", b"1") == 2, "what needs no reading still works"
    kv.delete(b"c")
    with kv.watch_from(EVERYTHING, Cursor(log.log_id, 1)) as watch:
        assert [row.key for row in watch.take(9, 0)] == [b"b", b"c", b"c"]


def test_a_key_value_store_that_was_overtaken_by_trimming_does_not_continue_after_the_hole(log: Log) -> None:
    kv, other = LogKeyValue(log), LogKeyValue(log)
    kv.put(b"a", b"1")
    assert kv.keys() == [b"a"]
    other.delete(b"a")
    other.put(b"b", b"1")
    trim(log, 2)
    for read in reads(kv):
        with pytest.raises(CursorExpired, match="had read up to 1"):
            read()


def test_a_key_value_store_that_had_read_all_outlives_a_trim(log: Log) -> None:
    kv = LogKeyValue(log)
    kv.put(b"a", b"1")
    kv.keys()
    trim(log, 1)
    kv.put(b"b", b"1")
    assert kv.keys() == [b"a", b"b"]


# --- with a base -----------------------------------------------------------------------------------------------


def based(log: Log, offset: int, *, on: UUID | None = None) -> MemoryStore:
    """A store that has followed the log up to an offset."""
    store = MemoryStore()
    stream = on or log.log_id
    rows = [batch for span in log.plan(log.start()) for batch in span.fetch()] if offset else []
    records = pa.Table.from_batches(rows, READ_SCHEMA).slice(0, offset)
    store.apply(records, since=Cursor(stream, 0), upto=Cursor(stream, offset))
    return store


@pytest.fixture
def trimmed(log: Log) -> tuple[Log, MemoryStore]:
    """A log whose first four records are trimmed, and a store that has them."""
    first = LogKeyValue(log)
    for key, value in ((b"node.1", b"1"), (b"node.2", b"1"), (b"other", b"1"), (b"node.2", b"2")):
        first.put(key, value)
    base = based(log, 4)
    first.put(b"node.3", b"1")
    first.delete(b"other")
    first.put(b"node.1", b"2")
    trim(log, 4)
    return log, base


def test_with_a_base_a_trimmed_log_is_read_whole(trimmed: tuple[Log, MemoryStore]) -> None:
    log, base = trimmed
    kv = LogKeyValue(log, base=base)
    assert [tuple(entry) for entry in kv.scan()] == [
        (b"node.1", b"2", 6),
        (b"node.2", b"2", None),
        (b"node.3", b"1", 4),
    ]
    assert kv.keys(b"node.") == sorted(kv.listing(Prefix("node.")).live)
    assert kv.get(b"other") is None


@pytest.mark.parametrize("most", [1, 100])
def test_values_of_the_base_come_first_in_a_watch_and_move_no_cursor(
    trimmed: tuple[Log, MemoryStore], most: int
) -> None:
    log, base = trimmed
    with LogKeyValue(log, base=base).watch(Prefix("node.")) as watch:
        taken = Collected(watch)
        taken.take(most)
        if most == 1:
            assert taken.at() == Cursor(log.log_id, 0)
        taken.until_listed(most)
    assert [(row.key, row.version) for row in taken.rows] == [(b"node.2", None), (b"node.3", 4), (b"node.1", 6)]
    assert taken.listed == Cursor(log.log_id, 7)


def test_a_key_of_the_base_has_no_version_to_expect_until_it_is_put(trimmed: tuple[Log, MemoryStore]) -> None:
    log, base = trimmed
    kv = LogKeyValue(log, base=base)
    for expected in (3, -1):
        with pytest.raises(Conflict, match="unknown until the next put"):
            kv.update(b"node.2", b"3", expected)
    with pytest.raises(AlreadyExists):
        kv.create(b"node.2", b"3")
    version = kv.put(b"node.2", b"3")
    assert kv.update(b"node.2", b"4", version) == version + 1


def test_a_base_that_cannot_serve_is_refused_with_what_to_do(trimmed: tuple[Log, MemoryStore]) -> None:
    log, _ = trimmed
    other = uuid4()
    resyncing = MemoryStore()
    resyncing.begin_resync(log.log_id)
    past = MemoryStore()
    past.apply(READ_SCHEMA.empty_table(), since=Cursor(log.log_id, 99), upto=Cursor(log.log_id, 99))
    for base, error, why in (
        (based(log, 0), CursorExpired, "a newer snapshot"),
        (past, CursorExpired, "past the log's end"),
        (based(log, 0, on=other), Diverged, str(other)),
        (MemoryStore(), InvalidInput, "has no cursor"),
        (resyncing, NotReady, "in a resync"),
    ):
        kv = LogKeyValue(log, base=base)
        for read in (kv.keys, kv.watch, lambda kv=kv: kv.get(b"node.1")):
            with pytest.raises(error, match=why):
                read()


def test_a_base_that_is_moved_while_it_is_read_is_not_trusted(trimmed: tuple[Log, MemoryStore]) -> None:
    log, base = trimmed

    class Moving:
        moves = 0

        def __getattr__(self, name: str) -> object:
            return getattr(base, name)

        def cursor(self, log_id: UUID) -> Cursor | None:
            return base.cursor(log_id)

        def range(self) -> Iterator[tuple[bytes, bytes]]:
            found = list(base.range())
            if self.moves:
                self.moves -= 1
                at = base.cursor(log.log_id)
                records = pa.Table.from_batches(log.plan(at)[0].fetch(), READ_SCHEMA)
                base.apply(records, since=at, upto=at.at(at.next + 1))
            return iter(found)

    moving = Moving()
    moving.moves = 2
    assert [tuple(entry) for entry in LogKeyValue(log, base=moving).scan()] == [
        (b"node.1", b"2", 6),
        (b"node.2", b"2", None),
        (b"node.3", b"1", None),
    ]
    for number in range(5):
        write(log, (b"%d" % number, b"1"))
    moving.moves = 3
    with pytest.raises(Contended, match="give a store that is not being written to"):
        LogKeyValue(log, base=moving).keys()


def test_a_newcomer_reads_a_trimmed_log_from_a_snapshot_of_a_follower(tmp_path: Path) -> None:
    log = open_log(str(tmp_path / "log"), create=True)
    writer = LogKeyValue(log)
    for number in range(30):
        writer.put(b"%d" % (number % 10), b"%d" % number)
    with RocksStore.open(str(tmp_path / "store"), sync=False) as store:
        follow(log, store, upto="end")
        store.export_to(str(tmp_path / "snapshot"))
    writer.delete(b"3")
    expected = {entry.key: entry.value for entry in writer.scan()}
    trim(log, 30)
    with RocksStore.import_from(str(tmp_path / "snapshot"), str(tmp_path / "base")) as base:
        newcomer = LogKeyValue(open_log(str(tmp_path / "log")), base=base)
        assert {entry.key: entry.value for entry in newcomer.scan()} == expected


def test_an_idle_watch_polls_its_log_only_a_few_times_a_second():
    clock, line = ManualClock(), FaultyStore(PlainStore())
    kv = LogKeyValue(open_log(line, create=True, env=Env(clock=clock)), env=Env(clock=clock))
    kv.put("a", b"1")
    with kv.watch() as watch:
        while watch.take(10, 0.05) is not None:
            pass
        before, began = len(line.named("get")), clock.monotonic()
        while clock.monotonic() - began < 60:
            assert watch.take(10, 0.05) is None
        assert len(line.named("get")) - before < 60 * 5
        kv.put("b", b"2")
        late = watch.take(10, 0.25)
    assert [update.key for update in late] == [b"b"]
