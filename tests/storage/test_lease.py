"""At no time do two believe that they hold a lease, whatever is slow, lost, late or asleep."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest

from strandline.errors import (
    Contended,
    CorruptData,
    Fenced,
    InvalidInput,
    OutcomeUnknown,
    StorageError,
    TransientStorageError,
)
from strandline.model.stamp import OpId, Stamped
from strandline.storage.env import Env
from strandline.storage.lease import MARGIN, Lease, LeaseCodec, LeaseState, Sighting, released, renewed, taken
from strandline.storage.objects.local import LocalStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Crash, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.interleave import Interleaver
from tests.matrix_cases import sampled

TERM = 10.0
STATE = LeaseState("one", UUID(int=1), 3, 17, TERM)
MINE = LeaseState("two", UUID(int=2), 0, 0, 20.0)


class TestTheRules:
    def test_a_lease_in_other_hands_stays_there(self):
        assert taken(STATE, MINE, None) is STATE

    def test_a_free_lease_is_taken_with_a_new_epoch(self):
        free = released(STATE, replace(MINE, token=STATE.token))
        assert (free.holder, free.epoch) == (None, 3)
        assert taken(free, MINE, None) == replace(MINE, epoch=4, beat=19)

    def test_a_new_holding_is_above_every_epoch_that_its_holder_has_seen(self):
        assert taken(STATE, replace(MINE, epoch=9), STATE).epoch == 10
        lease = Lease(PlainStore(), "lease", "two")
        assert lease.read() is None
        assert lease.try_acquire(above=7)
        assert lease.epoch == 8
        assert lease.read().holder == "two"

    def test_a_lease_that_ran_out_is_taken_only_if_it_is_still_exactly_that(self):
        assert taken(STATE, MINE, STATE) == replace(MINE, epoch=4, beat=18)
        beaten = replace(STATE, beat=18)
        assert taken(beaten, MINE, STATE) is beaten

    def test_taking_what_one_holds_keeps_the_epoch(self):
        assert taken(STATE, replace(MINE, token=STATE.token), None) == replace(
            STATE, holder="two", beat=18, seconds=20.0
        )

    def test_a_restarted_holder_with_its_old_name_is_another_holder(self):
        assert taken(STATE, replace(MINE, holder="one"), None) is STATE

    def test_renewing_keeps_the_epoch_and_is_fenced_by_another_holder(self):
        assert renewed(STATE, replace(STATE, epoch=0), 3) == replace(STATE, beat=18)
        with pytest.raises(Fenced, match=r"taken by 'one' \(epoch 3\)"):
            renewed(STATE, MINE, 2)

    def test_no_holder_releases_the_lease_of_another(self):
        assert released(STATE, MINE) is STATE

    def test_a_lease_runs_out_when_nothing_of_it_changed_for_a_full_term_of_its_holder(self):
        seen = Sighting(STATE, 100.0)
        assert not seen.again(STATE, 109.9).has_expired(109.9)
        assert seen.again(STATE, 110.0).has_expired(110.0)
        assert not seen.again(replace(STATE, beat=18), 110.0).has_expired(119.9)


class TestTheBytes:
    def test_a_lease_survives_its_bytes(self):
        state = Stamped(STATE, 5, (OpId(UUID(int=9)),))
        assert LeaseCodec().decode(LeaseCodec().encode(state), "x") == state

    def test_damage_is_never_a_free_lease(self):
        good = LeaseCodec().encode(Stamped(STATE, 5, (OpId(UUID(int=9)),)))
        dice = random.Random(3)
        for _ in range(2000):
            bad = bytearray(good)
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(len(bad))
                bad[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
            with contextlib.suppress(CorruptData):
                LeaseCodec().decode(bytes(bad), "x")

    @pytest.mark.parametrize("seconds", ["1e999", "-1", "0", "NaN", '"x"', "null", "[]", "9" * 400])
    def test_a_term_that_makes_no_sense_is_damage(self, seconds):
        data = LeaseCodec().encode(Stamped(STATE, 5, ())).replace(b"10.0", seconds.encode())
        with pytest.raises(CorruptData):
            LeaseCodec().decode(data, "x")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return FaultyStore(PlainStore(), clock=clock)


@pytest.fixture
def lease(store, clock):
    names = SeededChance(5)

    def make(name: str, seconds: float = TERM, *, on=clock, where=store) -> Lease:
        return Lease(
            where, "leases/export", name, seconds=seconds, env=Env(clock=on, chance=SeededChance(names.uuid().int))
        )

    return make


def wait_out(lease: Lease, clock: ManualClock, seconds: float = TERM) -> None:
    """Read the lease, let a term pass, and take it."""
    assert not lease.try_acquire()
    clock.advance(seconds)
    assert lease.try_acquire()


class TestHolding:
    def test_the_first_to_ask_holds_it_and_others_do_not(self, lease):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        assert not two.try_acquire()
        assert (one.held(), two.held(), one.epoch, two.epoch) == (True, False, 1, None)
        assert one.ensure() == 1
        with pytest.raises(Fenced, match="is not held"):
            two.ensure()

    def test_it_is_held_for_a_term_and_not_longer(self, lease, clock):
        one = lease("one")
        assert one.try_acquire()
        clock.advance(TERM * (1 - MARGIN) - 0.001)
        assert one.held()
        clock.advance(0.001)
        assert not one.held()
        with pytest.raises(Fenced, match="was not renewed within 10 s"):
            one.ensure()

    def test_renewing_holds_it_for_another_term_from_then(self, lease, clock):
        one = lease("one")
        assert one.try_acquire()
        for _ in range(5):
            clock.advance(6)
            one.renew()
        assert one.ensure() == 1

    def test_an_expired_lease_that_nobody_took_can_be_renewed(self, lease, clock):
        one = lease("one")
        assert one.try_acquire()
        clock.advance(60)
        assert not one.held()
        one.renew()
        assert one.ensure() == 1

    def test_releasing_gives_it_to_the_next_without_waiting(self, lease):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        one.release()
        one.release()
        assert not one.held()
        assert two.try_acquire()
        assert two.epoch == 2
        one.release()
        assert two.held()

    def test_one_that_was_never_acquired_cannot_be_renewed(self, lease):
        with pytest.raises(Fenced, match="Acquire it first"):
            lease("one").renew()

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_term_that_makes_no_sense_is_refused(self, lease, seconds):
        with pytest.raises(InvalidInput, match="seconds"):
            lease("one", seconds)

    def test_it_works_on_a_local_folder(self, lease, tmp_path, clock):
        place = LocalStore(str(tmp_path))
        one, two = lease("one", where=place), lease("two", where=place)
        assert one.try_acquire()
        wait_out(two, clock)
        with pytest.raises(Fenced, match=r"taken by 'two' \(epoch 2\)"):
            one.renew()


class TestChallenging:
    def test_a_challenger_waits_until_it_saw_the_lease_unchanged_for_a_full_term(self, lease, clock):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        clock.advance(1000)  # nobody looked: that counts for nothing
        assert not two.try_acquire()
        clock.advance(TERM - 0.001)
        assert not two.try_acquire()
        clock.advance(0.001)
        assert two.try_acquire()
        assert two.epoch == 2

    def test_each_renewal_makes_it_wait_a_full_term_again(self, lease, clock):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        assert not two.try_acquire()
        clock.advance(9)
        one.renew()
        clock.advance(9)
        assert not two.try_acquire()
        clock.advance(9.9)
        assert not two.try_acquire()
        clock.advance(0.1)
        assert two.try_acquire()

    def test_it_waits_for_the_holders_term_and_not_its_own(self, lease, clock):
        one, two = lease("one", 100.0), lease("two", 1.0)
        assert one.try_acquire()
        assert not two.try_acquire()
        clock.advance(99)
        assert not two.try_acquire()
        assert not one.held() or not two.held()
        clock.advance(1)
        assert two.try_acquire()

    def test_the_old_holder_is_fenced_and_changes_nothing(self, lease, clock, store):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        wait_out(two, clock)
        before = bytes(store.get("leases/export").data)
        with pytest.raises(Fenced, match="was lost"):
            one.renew()
        one.release()
        assert bytes(store.get("leases/export").data) == before
        assert one.epoch is None
        assert not one.try_acquire()

    def test_the_epoch_grows_with_each_new_holder_and_with_nothing_else(self, lease, clock):
        holders = [lease(name) for name in "abc"]
        assert holders[0].try_acquire()
        epochs = []
        for number in range(1, 9):
            holder = holders[number % 3]
            wait_out(holder, clock)
            holder.renew()
            holder.try_acquire()
            epochs.append(holder.epoch)
        assert epochs == list(range(2, 10))

    def test_of_two_racing_challengers_one_wins(self, lease, clock, store):
        one, two, three = lease("one"), lease("two"), lease("three")
        assert one.try_acquire()
        assert not two.try_acquire()
        assert not three.try_acquire()
        clock.advance(TERM)
        third = []

        def between(call):
            if call.name == "put_if" and call.stage == "before" and not third:
                third.append(None)
                third[0] = three.try_acquire()

        store.hook(between)
        assert not two.try_acquire(), "its write was for what it saw, and that is gone"
        assert third == [True]
        assert three.ensure() == 2

    def test_of_two_that_create_it_at_once_one_wins(self, lease, store):
        one, two = lease("one"), lease("two")
        second = []

        def between(call):
            if call.name == "put_if" and call.stage == "before" and not second:
                second.append(None)
                second[0] = two.try_acquire()

        store.hook(between)
        assert not one.try_acquire()
        assert second == [True]

    def test_a_holder_that_renews_at_the_last_moment_keeps_it(self, lease, clock, store):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        assert not two.try_acquire()
        clock.advance(TERM)
        renewals = []

        def between(call):
            if call.name == "put_if" and call.stage == "before" and not renewals:
                renewals.append(1)
                one.renew()

        store.hook(between)
        assert not two.try_acquire()
        assert one.held()

    def test_acquiring_waits_for_the_holder_to_run_out(self, lease, clock):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        began = clock.monotonic()
        assert two.acquire(timeout=120)
        assert TERM <= clock.monotonic() - began < 1.4 * TERM
        assert not one.held()

    def test_acquiring_gives_up_when_its_time_is_over(self, lease, clock):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        began = clock.monotonic()
        assert not two.acquire(timeout=5)
        assert clock.monotonic() - began == pytest.approx(5)
        assert not two.acquire(timeout=0)


class TestBadLines:
    def test_the_term_counts_from_before_the_renewal_was_asked(self, lease, clock, store):
        one = lease("one")
        assert one.try_acquire()
        slow = lambda call: clock.advance(4) if call.name == "put_if" and call.stage == "before" else None
        store.hook(slow)
        one.renew()
        store.unhook()
        clock.advance(TERM * (1 - MARGIN) - 4)
        assert not one.held()

    def test_an_answer_that_takes_longer_than_the_term_gives_nothing(self, lease, clock, store):
        one = lease("one")
        store.hook(lambda call: clock.advance(TERM) if call.name == "put_if" and call.stage == "after" else None)
        assert not one.try_acquire()
        assert not one.held()
        with pytest.raises(Fenced, match="was not renewed within"):
            one.renew()
        store.unhook()
        one.renew()
        assert one.ensure() == 1

    def test_an_acquisition_whose_answer_was_lost_is_found_again(self, lease, store):
        one, two = lease("one"), lease("two")
        store.lose_answers(1)
        assert one.try_acquire()
        one.release()
        store.lose_answers(1)
        assert two.try_acquire()
        assert (one.held(), two.ensure()) == (False, 2)

    def test_a_renewal_whose_answer_was_lost_counts_once_it_was_found(self, lease, clock, store):
        one = lease("one")
        assert one.try_acquire()
        clock.advance(9)
        store.lose_answers(1)
        one.renew()
        clock.advance(9)
        assert one.held()

    def test_a_store_that_is_down_leaves_it_held_as_long_as_it_was(self, lease, clock, store):
        one = lease("one")
        assert one.try_acquire()
        clock.advance(5)
        with store.down(), pytest.raises(StorageError):
            one.renew()
        assert one.held()
        clock.advance(5)
        assert not one.held()

    def test_an_acquisition_that_lands_late_is_not_believed_until_it_is_asked_for_again(self, lease, clock, store):
        one, two, free = lease("one"), lease("two"), lease("zero")
        assert free.try_acquire()
        free.release()
        store.delay_next("put_if", times=8)
        with pytest.raises((OutcomeUnknown, TransientStorageError)):
            one.try_acquire()
        assert not one.held()
        store.land_late()
        assert not one.held()
        assert not two.try_acquire(), "it is stored as one's"
        assert one.try_acquire()

    def test_releasing_does_not_fail_and_ends_at_once_when_the_store_is_down(self, lease, clock, store):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        with store.down():
            one.release()
        assert not one.held()
        wait_out(two, clock)


class TestSuspension:
    def test_a_suspended_holder_does_not_believe_on_when_it_wakes(self, lease, clock):
        asleep = ManualClock()
        one, two = lease("one", on=asleep), lease("two")
        assert one.try_acquire()
        wait_out(two, clock)
        asleep.suspend(TERM)
        assert asleep.monotonic() == 0
        assert not one.held()
        with pytest.raises(Fenced):
            one.ensure()

    def test_a_challenger_that_slept_has_seen_the_lease_unchanged(self, lease):
        asleep = ManualClock()
        one, two = lease("one"), lease("two", on=asleep)
        assert one.try_acquire()
        assert not two.try_acquire()
        asleep.suspend(TERM)
        assert two.try_acquire()

    def test_the_wall_clock_has_no_say(self, lease, clock):
        one, two = lease("one"), lease("two")
        assert one.try_acquire()
        assert not two.try_acquire()
        clock.set_wall(clock.now() + 10**15)
        assert one.held()
        assert not two.try_acquire()
        clock.set_wall(0)
        clock.advance(TERM)
        assert two.try_acquire()


class TestKeeping:
    def test_a_kept_lease_is_renewed_while_its_block_runs(self, lease, store):
        clock = ManualClock(auto=False)
        one, two = lease("one", on=clock), lease("two", on=clock)
        assert one.try_acquire()
        beats = threading.Semaphore(0)
        store.hook(lambda call: beats.release() if (call.name, call.stage) == ("put_if", "after") else None)
        with one.kept():
            for _ in range(9):
                assert clock.wait_until_blocked(1)
                clock.advance(TERM / 3)
                assert beats.acquire(timeout=120)
            assert clock.wait_until_blocked(1)
            assert one.held()
            assert not two.try_acquire()
        assert one.held()

    def test_ensure_reports_a_lost_lease_that_a_thread_renews(self, lease, store):
        clock, other = ManualClock(auto=False), ManualClock()
        one, two = lease("one", on=clock), lease("two", on=other)
        assert one.try_acquire()
        with one.kept():
            assert clock.wait_until_blocked(1)
            wait_out(two, other)
            clock.advance(TERM / 3)
            while one.epoch is not None:  # its lost race makes it pause before it looks
                clock.wait_until_blocked(1, patience=0.01)
                clock.advance(0.1)
        with pytest.raises(Fenced, match="is not held"):
            one.ensure()

    def test_a_failing_store_does_not_end_the_keeping(self, lease, store):
        clock = ManualClock(auto=False)
        one = lease("one", on=clock)
        assert one.try_acquire()
        tries = threading.Semaphore(0)
        store.hook(lambda call: tries.release() if (call.name, call.stage) == ("put_if", "before") else None)
        error = StorageError("The store said no.")
        store.fail_next("put_if", times=2, error=error)
        with one.kept():
            for _ in range(3):
                assert clock.wait_until_blocked(1)
                clock.advance(TERM / 4)
                clock.advance(TERM / 12)
                assert tries.acquire(timeout=120)
            assert clock.wait_until_blocked(1)
            one.renew()
        assert one.held()


# --- whole histories -------------------------------------------------------------------------------------------


class NodeClock:
    """One machine's view of the common time: its wall clock is off, and its monotonic one may miss suspensions."""

    def __init__(self, shared: ManualClock, skew: int, order: Interleaver, dice: random.Random) -> None:
        self.shared, self.skew, self.order, self.dice = shared, skew, order, dice
        self.missed = 0.0

    def now(self) -> int:
        return self.shared.now() + self.skew

    def now_ns(self) -> int:
        return self.now() * 1000

    def monotonic(self) -> float:
        return self.shared.monotonic() - self.missed

    def boot(self) -> float:
        return self.shared.monotonic()

    def sleep(self, seconds: float) -> None:
        self.shared.advance(seconds)
        self.pause()

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        raise NotImplementedError

    def pause(self) -> None:
        """Perhaps let others run, and perhaps suspend this machine meanwhile."""
        before = self.shared.monotonic()
        self.order.point()
        if self.dice.random() < 0.3:
            self.shared.advance(self.dice.random() * TERM)
        if self.dice.random() < 0.5:
            self.missed += self.shared.monotonic() - before


BAD = Faults(before=0.05, after=0.1, late=0.05, throttled=0.02, latency=2.0)


@dataclass
class History:
    held: int = 0
    fenced: int = 0
    epochs: list[tuple[int, str]] = field(default_factory=list)


def play(seed: int, kind: type[Lease] = Lease) -> History:  # noqa: C901 - one story, told in one place
    """Three nodes that acquire, renew, work, sleep, die and release; raises if two hold the lease at once."""
    chance = random.Random(seed)
    order, shared, place, history = Interleaver(chance.getrandbits(64)), ManualClock(), PlainStore(), History()
    leases: dict[str, Lease] = {}

    def check() -> None:
        believers = [name for name, lease in leases.items() if lease.held()]
        assert len(believers) <= 1, f"seed {seed}: {believers} all believe that they hold the lease"

    def node(name: str, dice: random.Random):
        clock = NodeClock(shared, dice.randint(-(10**9), 10**9), order, dice)
        line = FaultyStore(place, seed=dice.getrandbits(64), faults=BAD, clock=shared)

        def hook(call):
            clock.pause()
            check()
            if dice.random() < 0.004:
                raise Crash(name)

        line.hook(hook)

        def work() -> None:
            lease = None
            for _ in range(12):
                check()
                try:
                    if lease is None:
                        token = SeededChance(dice.getrandbits(64))
                        lease = kind(line, "lease", name, seconds=TERM, env=Env(clock=clock, chance=token))
                        leases[name] = lease
                    if not lease.held():
                        lease.try_acquire()
                    elif dice.random() < 0.2:
                        lease.release()
                    else:
                        lease.renew()
                    if lease.held():
                        history.held += 1
                        history.epochs.append((lease.ensure(), name))
                except Crash:
                    lease = None
                    del leases[name]
                except Fenced:
                    history.fenced += 1
                except (OutcomeUnknown, Contended, TransientStorageError):
                    pass
                check()
                clock.sleep(dice.random() * TERM / 2)
            leases.pop(name, None)

        return work

    order.run([node(name, random.Random(chance.getrandbits(64))) for name in "abc"])
    epochs = [epoch for epoch, _ in history.epochs]
    assert epochs == sorted(epochs), f"seed {seed}: epochs went back: {history.epochs}"
    holders = {}
    for epoch, name in history.epochs:
        assert holders.setdefault(epoch, name) == name, f"seed {seed}: two had epoch {epoch}"
    return history


def play_many(seeds, kind: type[Lease]) -> None:
    for seed in seeds:
        play(seed, kind)


class CountsFromTheAnswer(Lease):
    """Broken: its term begins when the answer came."""

    def _granted(self, state, asked):
        return super()._granted(state, self._env.clock.boot())


class CountsFromBeforeTheLook(Lease):
    """Broken: as a challenger it counts from before it read the lease."""

    def try_acquire(self):
        self._before = self._env.clock.boot()
        return super().try_acquire()

    def _observe(self, state):
        now = self._env.clock.boot()
        self._seen = Sighting(state, self._before) if self._seen is None else self._seen.again(state, self._before)
        return state if self._seen.has_expired(now) else None


class TrustsTheWallClock(Lease):
    """Broken: writes down when it asked, and believes what others wrote."""

    def _op(self):
        self._mine = replace(self._mine, holder=f"{self._mine.holder.partition('@')[0]}@{self._env.clock.now()}")
        return super()._op()

    def _create(self, asked, above):
        self._op()
        return super()._create(asked, above)

    def _observe(self, state):
        if state.holder is None:
            return None
        written = int(state.holder.partition("@")[2])
        return state if self._env.clock.now() - written > state.seconds * 1e6 else None


class ForgetsSuspension(Lease):
    """Broken: counts on a clock that stops while the machine is suspended."""

    def __init__(self, *args, env, **options):
        clock = env.clock
        awake = type("Awake", (), {name: getattr(clock, name) for name in ("now", "monotonic", "sleep", "wait")})
        awake.boot = clock.monotonic
        super().__init__(*args, env=replace(env, clock=awake), **options)


class ComesBackUnderItsName(Lease):
    """Broken: takes any lease with its name for its own."""

    def __init__(self, store, path, holder, **options):
        super().__init__(store, path, holder, **options)
        self._mine = replace(self._mine, token=UUID(int=7))


class BelievesTooLong(Lease):
    """Broken: checks the deadline only when it renews."""

    def held(self):
        return self._held_term is not None


TWINS = [
    CountsFromTheAnswer,
    CountsFromBeforeTheLook,
    TrustsTheWallClock,
    ForgetsSuspension,
    ComesBackUnderItsName,
    BelievesTooLong,
]


class TestHistories:
    @pytest.mark.parametrize("every", sampled(4))
    def test_at_no_time_do_two_believe_that_they_hold_it(self, every):
        played = [play(seed) for seed in range(0, 150, every)]
        assert sum(history.held for history in played) > 500 / every, "something must have happened"
        assert sum(len({epoch for epoch, _ in history.epochs}) > 2 for history in played) > 50 / every

    @pytest.mark.slow
    def test_at_no_time_do_two_believe_that_they_hold_it_for_long(self):
        for seed in range(1000, 6000):
            play(seed)

    @pytest.mark.matrix
    @pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
    def test_a_broken_twin_is_caught(self, twin):
        with pytest.raises(AssertionError, match=r"believe that they hold|two had epoch|went back"):
            play_many(range(400), twin)
