"""The doubles do what they say: a test that leans on one must not lean on air."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from strandline.errors import DiskFull, InvalidInput, NotFound, StorageError, TransientStorageError
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.disk import DISK, AppendFile, Disk
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import CALM, Call, Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import SimulatedDisk
from strandline.testing.stores import content, paths
from tests.disk_doubles import FullDisk, RecordingDisk, SlowSyncDisk
from tests.interleave import Interleaver


def test_the_doubles_satisfy_the_protocols_that_they_replace() -> None:
    assert isinstance(ManualClock(), Clock)
    assert isinstance(CLOCK, Clock)
    assert isinstance(SeededChance(1), Chance)
    assert isinstance(CHANCE, Chance)
    assert isinstance(PlainStore(), ObjectStore)
    assert isinstance(FaultyStore(PlainStore()), ObjectStore)
    assert isinstance(FullDisk(DISK, 1), Disk)
    assert isinstance(RecordingDisk(), Disk)
    assert isinstance(SlowSyncDisk(DISK, 1), Disk)
    for disk in (FullDisk(SimulatedDisk(), 1), RecordingDisk(SimulatedDisk()), SlowSyncDisk(SimulatedDisk(), 1)):
        assert isinstance(disk.open_append("/a"), AppendFile)


class TestDisks:
    def test_a_full_disk_counts_what_open_files_add_and_not_what_they_rewrite(self) -> None:
        inner = SimulatedDisk()
        disk = FullDisk(inner, 10)
        file = disk.open_append("/log")
        file.write([b"123", b"45"])
        file.rewrite(0, [b"abcde"])
        assert disk.room == 5
        file.rewrite(3, [b"DE", b"FG"])
        assert (disk.room, disk.refused) == (3, 0)
        with pytest.raises(DiskFull):
            file.write([b"hijk"])
        assert (inner.read("/log"), disk.room, disk.refused) == (b"abcDEFGhij", 0, 1)
        with pytest.raises(DiskFull):
            file.rewrite(8, [b"-", b"--"])
        assert (inner.read("/log"), disk.refused) == (b"abcDEFGh--", 2)
        file.cut(5)
        assert disk.room == 0
        disk.make_room(2)
        file.write([b"!!"])
        assert inner.read("/log") == b"abcDE!!"

    def test_a_recording_disk_remembers_what_was_done_to_open_files_and_not_what_failed(self) -> None:
        inner = SimulatedDisk()
        disk = RecordingDisk(inner)
        file = disk.open_append("/log")
        file.write([b"12"])
        file.rewrite(0, [b"3"])
        inner.interrupt(len(inner.calls), StorageError("no"))
        with pytest.raises(StorageError):
            file.sync()
        file.sync()
        file.cut(1)
        file.close()
        disk.sync_folder("/")
        assert [(event.action, event.path) for event in disk.events] == [
            ("open_append", "/log"), ("append", "/log"), ("rewrite", "/log"), ("sync", "/log"), ("cut", "/log"),
            ("sync_folder", "/"),
        ]  # fmt: skip
        assert inner.read("/log") == b"3"

    def test_a_slow_sync_takes_its_time_and_syncs_nothing_and_all_else_continues_as_ever(self) -> None:
        inner, clock = SimulatedDisk(), ManualClock()
        disk = SlowSyncDisk(inner, 0.001, clock=clock)
        file = disk.open_append("/log")
        file.write([b"123"])
        file.rewrite(1, [b"x"])
        disk.sync_folder("/")
        assert clock.slept == []
        file.sync()
        file.sync()
        assert clock.slept == [0.001, 0.001]
        assert (disk.read("/log"), inner.durable()) == (b"1x3", {"/log": b""})
        assert not {call.action for call in inner.calls} & {"sync", "sync_file"}
        disk.sync_file("/log")
        assert inner.durable() == {"/log": b"1x3"}

    def test_others_run_while_a_slow_sync_takes_its_time(self) -> None:
        clock = ManualClock(auto=False)
        disk = SlowSyncDisk(SimulatedDisk(), 0.5, clock=clock)
        syncing = threading.Thread(target=disk.open_append("/log").sync)
        syncing.start()
        assert clock.wait_until_blocked(1)
        disk.open_append("/log").write([b"meanwhile"])
        assert disk.read("/log") == b"meanwhile"
        clock.advance(0.5)
        syncing.join()


class TestManualClock:
    def test_it_moves_only_when_it_is_advanced(self) -> None:
        clock = ManualClock(now=1_000_000)
        assert (clock.now(), clock.monotonic()) == (1_000_000, 0.0)
        clock.advance(1.5)
        assert (clock.now(), clock.monotonic()) == (2_500_000, 1.5)
        assert clock.now_ns() == 2_500_000_000

    def test_sleeping_moves_it_when_it_runs_by_itself(self) -> None:
        clock = ManualClock()
        for _ in range(10):
            clock.sleep(0.1)
        assert clock.monotonic() == 1.0
        assert clock.slept == [0.1] * 10

    def test_waiting_moves_it_when_it_runs_by_itself(self) -> None:
        clock, event = ManualClock(), threading.Event()
        assert not clock.wait(event, 3.0)
        assert clock.monotonic() == 3.0
        event.set()
        assert clock.wait(event, 3.0)
        assert clock.wait(event, None)
        assert clock.monotonic() == 3.0

    def test_it_cannot_go_back_but_the_wall_can(self) -> None:
        clock = ManualClock(now=5_000_000)
        with pytest.raises(InvalidInput):
            clock.advance(-1)
        clock.advance(1.0)
        clock.set_wall(2_000_000)
        assert (clock.now(), clock.monotonic()) == (2_000_000, 1.0)

    def test_a_sleeper_wakes_when_its_time_has_come_and_not_before(self) -> None:
        clock = ManualClock(auto=False)
        woke: list[float] = []
        thread = in_thread(lambda: (clock.sleep(2.0), woke.append(clock.monotonic())))
        assert clock.wait_until_blocked(1)
        clock.advance(1.9)
        assert clock.wait_until_blocked(1)
        assert woke == []
        clock.advance(0.2)
        thread.join(120)
        assert woke == [pytest.approx(2.1)]

    def test_a_wait_returns_false_when_its_time_has_passed(self) -> None:
        clock, event = ManualClock(auto=False), threading.Event()
        answers: list[bool] = []
        thread = in_thread(lambda: answers.append(clock.wait(event, 5.0)))
        assert clock.wait_until_blocked(1)
        clock.advance(5.0)
        thread.join(120)
        assert answers == [False]

    @pytest.mark.parametrize("timeout", [5.0, None])
    def test_a_wait_returns_true_when_its_event_was_set(self, timeout: float | None) -> None:
        clock, event = ManualClock(auto=False), threading.Event()
        answers: list[bool] = []
        thread = in_thread(lambda: answers.append(clock.wait(event, timeout)))
        assert clock.wait_until_blocked(1)
        event.set()
        thread.join(120)
        assert answers == [True]
        assert clock.monotonic() == 0.0


def test_seeded_chance_repeats_itself_and_only_itself() -> None:
    one, same, other = SeededChance(1), SeededChance(1), SeededChance(2)
    drawn = [one.uuid() for _ in range(100)]
    assert drawn == [same.uuid() for _ in range(100)]
    assert len(set(drawn) | {other.uuid() for _ in range(100)}) == 200
    assert all(0 <= one.jitter() < 1 for _ in range(100))
    assert drawn[0].version == 4


class TestFaultyStore:
    @pytest.fixture
    def place(self) -> PlainStore:
        place = PlainStore()
        place.put("old", b"old")
        return place

    def test_the_same_seed_fails_in_the_same_places(self, place: PlainStore) -> None:
        bad = Faults(before=0.2, after=0.2, late=0.1, throttled=0.1)

        def run(seed: int) -> list[str]:
            store = FaultyStore(place, seed=seed, faults=bad)
            for number in range(100):
                attempt(lambda: store.put(f"n{number}", b""))  # noqa: B023 - called at once
            return [row.outcome for row in store.log]

        assert run(1) == run(1)
        assert run(1) != run(2)
        assert set(run(1)) == {"before", "after", "late", "throttled", "answered"}

    def test_rates_of_one_operation_leave_the_others_alone(self, place: PlainStore) -> None:
        store = FaultyStore(place, per_operation={"put": Faults(before=1.0)})
        assert content(store, "old") == b"old"
        with pytest.raises(TransientStorageError):
            store.put("new", b"")
        assert paths(store) == ["old"]

    def test_failing_before_writes_nothing_and_failing_after_does(self, place: PlainStore) -> None:
        store = FaultyStore(place)
        store.fail_next("put")
        store.fail_next("put", after=True)
        for name in ("before", "after"):
            with pytest.raises(TransientStorageError):
                store.put(name, b"")
        assert paths(place) == ["after", "old"]

    def test_a_script_fails_only_its_names_and_paths_and_only_its_count(self, place: PlainStore) -> None:
        store = FaultyStore(place)
        store.fail_next("put", "delete", path_prefix="head/", times=2)
        store.put("other", b"")
        assert content(store, "old") == b"old"
        with pytest.raises(TransientStorageError):
            store.put("head/1", b"")
        with pytest.raises(TransientStorageError):
            store.delete("head/2")
        store.put("head/3", b"")
        assert [row.outcome for row in store.named("put", "delete")] == ["answered", "before", "before", "answered"]

    def test_a_script_can_raise_an_error_of_its_own(self, place: PlainStore) -> None:
        store = FaultyStore(place)
        store.fail_next("get", error=NotFound("as scripted"))
        with pytest.raises(NotFound, match="as scripted"):
            store.get("old")

    def test_a_late_write_lands_on_request(self, place: PlainStore) -> None:
        store = FaultyStore(place)
        store.delay_next("put")
        with pytest.raises(TransientStorageError, match="in time"):
            store.put("late", b"1")
        assert paths(store) == ["old"]
        store.land_late()
        assert paths(store) == ["late", "old"]
        store.delete("late")
        store.land_late()
        assert paths(store) == ["old"]

    def test_a_random_late_write_lands_by_itself(self, place: PlainStore) -> None:
        store = FaultyStore(place, per_operation={"put": Faults(late=1.0)})
        with pytest.raises(TransientStorageError):
            store.put("late", b"1")
        assert any("late" in paths(store) for _ in range(100))

    def test_a_store_that_is_down_does_nothing_until_it_is_up(self, place: PlainStore) -> None:
        store = FaultyStore(place)
        with store.down():
            for call in (lambda: store.get("old"), lambda: store.put("new", b""), lambda: list(store.list(""))):
                with pytest.raises(TransientStorageError, match="down"):
                    call()
        assert paths(store) == ["old"]

    def test_new_objects_are_missing_from_listings_for_a_while_and_old_ones_are_not(self, place: PlainStore) -> None:
        clock = ManualClock()
        store = FaultyStore(place, stale_listing=2.0, clock=clock)
        store.put("new", b"")
        clock.advance(1.0)
        store.put("newer", b"")
        store.put("new", b"again")
        assert paths(store) == ["old"]
        assert content(store, "newer") == b""
        clock.advance(1.0)
        assert paths(store) == ["new", "old"]
        clock.advance(1.0)
        assert paths(store) == ["new", "newer", "old"]

    def test_latency_passes_on_the_clock(self, place: PlainStore) -> None:
        clock = ManualClock()
        store = FaultyStore(place, faults=Faults(latency=4.0), clock=clock)
        for _ in range(20):
            store.get("old")
        assert len(clock.slept) == 20
        assert 0 < max(clock.slept) <= 4.0

    def test_a_hook_is_called_before_and_after_each_operation(self, place: PlainStore) -> None:
        store, calls = FaultyStore(place), []
        store.hook(calls.append)
        store.put("a", b"")
        store.get("a")
        assert calls == [
            Call(0, "put", "a", "before"),
            Call(0, "put", "a", "after"),
            Call(1, "get", "a", "before"),
            Call(1, "get", "a", "after"),
        ]
        store.unhook()
        store.get("a")
        assert len(calls) == 4

    @pytest.mark.parametrize(("after", "there"), [(False, ["old"]), (True, ["b", "old"])])
    def test_a_crash_comes_at_its_operation_and_no_error_handler_catches_it(
        self, place: PlainStore, there: list[str], *, after: bool
    ) -> None:
        store = FaultyStore(place)
        store.crash_at(1, after=after)
        store.get("old")
        with pytest.raises(Crash):
            attempt(lambda: store.put("b", b""))
        assert paths(place) == there
        assert store.log[1].outcome == "raised"
        assert not issubclass(Crash, Exception)

    def test_a_healed_store_is_well(self, place: PlainStore) -> None:
        store = FaultyStore(place, faults=Faults(before=1.0), per_operation={"put": Faults(before=1.0)})
        store.fail_next(times=100)
        store.turn_down()
        store.heal()
        store.put("a", b"1")
        assert content(store, "a") == b"1"
        assert store.faults == CALM


class TestInterleaver:
    def test_every_order_of_steps_is_reached_by_some_seed(self) -> None:
        orders = set()
        for seed in range(200):
            order = Interleaver(seed)
            seen: list[str] = []

            def task(name: str, order: Interleaver = order, seen: list[str] = seen) -> None:
                for _ in range(2):
                    order.point()
                    seen.append(name)

            order.run([lambda task=task: task("a"), lambda task=task: task("b")])
            orders.add("".join(seen))
        assert orders == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}

    def test_one_task_runs_at_a_time(self) -> None:
        order, running, most = Interleaver(1), [], []

        def task() -> None:
            for _ in range(50):
                running.append(1)
                most.append(len(running))
                running.pop()
                order.point()

        order.run([task] * 4)
        assert max(most) == 1
        assert len(most) == 200

    def test_an_error_of_a_task_is_raised_when_all_have_ended(self) -> None:
        order, ended = Interleaver(1), []

        def failing() -> None:
            order.point()
            raise ValueError("as scripted")

        def other() -> None:
            for _ in range(5):
                order.point()
            ended.append(True)

        with pytest.raises(ValueError, match="as scripted"):
            order.run([failing, other])
        assert ended == [True]

    def test_outside_its_tasks_a_point_is_nothing(self) -> None:
        Interleaver(1).point()


def attempt(action: Callable[[], object]) -> None:
    """Call it and ignore every error, as careless code does."""
    try:
        action()
    except Exception:  # noqa: BLE001
        return


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread
