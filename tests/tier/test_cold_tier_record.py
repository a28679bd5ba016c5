"""Where a log's cold tier is written down, and the handshake of expiry and slots: one sees the other in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from strandline.errors import (
    AlreadyExists,
    CorruptData,
    CursorExpired,
    InvalidInput,
    StrandlineError,
    UnsupportedVersion,
)
from strandline.formats.json.checked import encode_checked
from strandline.model.cursor import Cursor
from strandline.model.retention import Consumed, MaxBytes
from strandline.model.segments import COLD_FILE as COLD
from strandline.model.segments import ColdTier
from strandline.model.stamp import OpId, Stamped
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.tier.attachment import COLD_CODEC, ColdCell
from strandline.tier.copy.segment_files import forget_tails
from tests.interleave import Interleaver
from tests.matrix_cases import some
from tests.tier.read.tiered_logs import KINDS, Kind, Tiers, rows

LOG = UUID(int=7)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


def cell_in(store: ObjectStore, log_id: UUID = LOG) -> ColdCell:
    return ColdCell(store, log_id, env=Env(clock=ManualClock(), chance=SeededChance(3)))


# --- what is written down --------------------------------------------------------------------------------------

GIVEN = Stamped(ColdTier(LOG, "s3://b/cold", "kafka://h:1/t", 8, "orders", 70, 50, 3), 4, (OpId(UUID(int=5)),))


def test_written_records_are_read_again() -> None:
    codec = COLD_CODEC
    assert codec.decode(codec.encode(GIVEN), "here") == GIVEN


def test_damage_anywhere_is_reported_and_never_taken_for_no_cold_tier() -> None:
    codec = COLD_CODEC
    data = codec.encode(GIVEN)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at] + b"\xff" + data[at:]):
            try:
                found = codec.decode(damaged, "here")
            except CorruptData as error:
                assert "here" in str(error)  # noqa: PT017
            else:
                assert found == GIVEN  # white space


@pytest.mark.parametrize(
    "changes",
    [
        {"log_id": "no id"},
        {"log_id": 7},
        {"store": ""},
        {"store": None},
        {"events": 3},
        {"partitions": 0},
        {"partitions": True},
        {"partitions": "8"},
        {"name": None},
        {"start": -1},
        {"start": 1.5},
        {"start": 40},
        {"gone": 71},
        {"gone": None},
        {"announced": -1},
        {"revision": None},
        {"recent": None},
        {"recent": ["x"]},
        {"recent": [7]},
        {"recent": "abc"},
        {"min_reader": "1"},
    ],
)
def test_fields_that_cannot_be_are_damage_though_the_checksum_is_right(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "min_reader": 1,
        "log_id": str(LOG),
        "store": "s3://b/cold",
        "events": "kafka://h:1/t",
        "partitions": 8,
        "name": "orders",
        "start": 70,
        "gone": 50,
        "announced": 3,
        "revision": 4,
        "recent": [OpId(UUID(int=5)).hex],
    }
    assert COLD_CODEC.decode(encode_checked("strandline-cold", 1, fields), "here") == GIVEN
    with pytest.raises(CorruptData, match="here"):
        COLD_CODEC.decode(encode_checked("strandline-cold", 1, fields | changes), "here")
    for name in fields:
        less = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(CorruptData):
            COLD_CODEC.decode(encode_checked("strandline-cold", 1, less), "here")


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"checksum": 1}', b"1e999"]
)
def test_bytes_that_are_something_else_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptData):
        COLD_CODEC.decode(data, "here")


def test_data_of_a_newer_version_is_not_read() -> None:
    with pytest.raises(UnsupportedVersion):
        COLD_CODEC.decode(encode_checked("strandline-cold", 1, {"min_reader": 2}), "here")


def test_a_cold_tier_is_attached_once() -> None:
    store = PlainStore()
    cell = cell_in(store)
    assert cell.read() is None
    cold = cell.attach("s3://b/cold", "s3://b/events", partitions=2, name="orders")
    assert cell_in(store).read() == cold == ColdTier(LOG, "s3://b/cold", "s3://b/events", 2, "orders")
    number = cell.announce(10)
    assert cell.decide(number, 5)
    assert cell_in(store).attach("s3://b/cold", "s3://b/events", partitions=2).start == 5
    for other in (
        ("s3://b/x", "s3://b/events", 2),
        ("s3://b/cold", "s3://b/y", 2),
        ("s3://b/cold", "s3://b/events", 3),
    ):
        with pytest.raises(AlreadyExists, match="s3://b/cold"):
            cell.attach(other[0], other[1], partitions=other[2])
    with pytest.raises(CorruptData, match=COLD):
        cell_in(store, UUID(int=8)).read()


@pytest.mark.parametrize("changes", [{"partitions": 0}, {"start": -1}, {"store": ""}, {"events": ""}, {"gone": 1}])
def test_a_cold_tier_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ColdTier(**({"log_id": LOG, "store": "a", "events": "b", "partitions": 1} | changes))


# --- announcing and deciding -----------------------------------------------------------------------------------


@pytest.fixture
def cell() -> ColdCell:
    made = cell_in(PlainStore())
    made.attach("s3://b/cold", "s3://b/events")
    return made


def test_announced_segments_may_stay_and_decided_ones_are_gone_for_good(cell: ColdCell) -> None:
    number = cell.announce(100)
    assert cell.read().start == 100
    assert cell.is_undecided()
    assert cell.decide(number, 60)
    assert (cell.read().start, cell.read().gone, cell.is_undecided()) == (60, 60, False)
    assert cell.decide(cell.announce(80), 30)
    assert (cell.read().start, cell.read().gone) == (60, 60)


def test_only_the_last_announcer_decides(cell: ColdCell) -> None:
    first = cell.announce(100)
    second = cell.announce(50)
    assert cell.read().start == 100
    assert not cell.decide(first, 100)
    assert cell.decide(second, 20)
    assert not cell.decide(first, 100)
    assert (cell.read().start, cell.read().gone) == (20, 20)


# --- the handshake ---------------------------------------------------------------------------------------------


class Script:
    """Chooses the task that runs next: each in turn for a number of steps, then each to its end."""

    def __init__(self, turns: Sequence[tuple[int, int]]) -> None:
        self._turns = [list(turn) for turn in turns]
        self.taken: dict[int, int] = {}

    def choice(self, unfinished: Sequence[int]) -> int:
        while self._turns and (self._turns[0][1] <= 0 or self._turns[0][0] not in unfinished):
            self._turns.pop(0)
        if self._turns:
            self._turns[0][1] -= 1
        task = self._turns[0][0] if self._turns else unfinished[0]
        self.taken[task] = self.taken.get(task, 0) + 1
        return task


def run(turns: Sequence[tuple[int, int]], order: Interleaver, tasks: Sequence[Callable[[], None]]) -> dict[int, int]:
    """Run tasks in this order, and say how many steps each took."""
    script = Script(turns)
    order._random = script  # type: ignore[assignment]
    order.run(tasks)
    return script.taken


@functools.cache
def base(kind: Kind) -> Tiers:
    """A log of four batches, all of it in segments, and the first three in nothing else."""
    tiers = Tiers(kind, batches=4, background=False)
    tiers.tier(target=1)
    tiers.trim(tiers.firsts[3])
    assert len(tiers.finished()) == 4
    return tiers


class UnfencedSlot:
    """A tierer's slot that does not tell it of its successor: announcements alone have to keep what slots need."""

    def touch(self) -> None:
        """Nobody has taken over, as far as it knows."""


def expire(tierer: Any) -> None:
    tierer._expiry.run(UnfencedSlot())


class Scene:
    """Slots that are created and segments that expire, all of it interleaved at each operation on the store."""

    def __init__(self, kind: Kind, position: int) -> None:
        self.tiers = base(kind).copy()
        self.position = position
        self.order = Interleaver(0)
        self.store = FaultyStore(self.tiers.plain, clock=self.tiers.clock)
        self.granted: bool | None = None
        forget_tails()
        self.log = self.tiers.tiered(store=self.store)
        self.log.bounds()
        self.tierers: list[Any] = []
        # What is done on the disk of a log is not interleaved: so there are points also behind each operation.
        stages = ("before",) if kind == "object" else ("before", "after")
        self.store.hook(lambda call: self.order.point() if call.stage in stages else None)

    def tierer(self, announced: Any = None) -> Any:
        tierer = self.tiers.tierer(store=self.store, retention=MaxBytes(1))
        if announced is not None:
            tierer._expiry = replace(tierer._expiry, announced=announced(tierer._expiry.announced))
        tierer._claimed()
        self.tierers.append(tierer)
        return tierer

    def create(self) -> None:
        try:
            self.log.slots.create("billing", self.position)
        except CursorExpired:
            self.granted = False
        else:
            self.granted = True

    def judge(self) -> str | None:
        """What is wrong, if anything is: a slot that was granted keeps all that it needs, from now on and for ever."""
        self.store.unhook()
        forget_tails()
        log, end = self.tiers.tiered(), len(self.tiers.truth)
        for _ in range(2):
            try:
                found = rows(log.read(Cursor(log.log_id, self.position))) if self.granted else []
            except StrandlineError as error:
                return f"granted, and then {error!r}"
            if self.granted and found != self.tiers.truth[self.position :]:
                return "granted, and something else is there"
            self.tiers.tier(retention=MaxBytes(1))
        if not self.granted:
            if any(state.name == "billing" for state in log.slots.list()):
                return "refused, and there all the same"
            self.tiers.trim()
            self.tiers.tier(retention=MaxBytes(1))
            if log.bounds().first != end:
                return "refused, and it pins all the same"
        return None


def explored(kind: Kind, position: int, announced: Any = None, looking: Any = None, every: int = 1) -> list[str]:
    """The first thing that goes wrong in the orders in which creating and expiring change places twice."""
    wrong: list[str] = []

    def play(turns: list[tuple[int, int]]) -> dict[int, int]:
        scene = Scene(kind, position)
        tierer = scene.tierer(announced)
        if looking is not None:
            scene.log._cold = looking(scene.log._cold)
        taken = run(turns, scene.order, [scene.create, lambda: expire(tierer)])
        found = scene.judge()
        if found is not None:
            wrong.append(f"{turns}: {found}")
        return taken

    alone = [play([(first, 999)]) for first in (0, 1)]
    steps = [max(taken[task] for taken in alone) for task in (0, 1)]
    orders = [
        [(first, i), (1 - first, j), (first, 999)]
        for first in (0, 1)
        for i in range(1, steps[first] + 1)
        for j in range(1, steps[1 - first] + 1)
    ]
    for turns in orders[::every]:
        play(turns)
        if wrong:
            break
    return wrong


EVERY = [pytest.param(21, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.matrix
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_in_the_cold_tier_is_refused_or_keeps_what_it_needs(kind: Kind, every: int) -> None:
    assert explored(kind, base(kind).firsts[1] + 1, every=every) == []


class AnnouncedLate:
    """A twin that looks who needs something, and announces only then."""

    def __init__(self, cell: ColdCell) -> None:
        self._cell = cell

    def is_undecided(self) -> bool:
        return False

    def announce(self, _: int) -> int:
        return 0

    def decide(self, _: int, start: int) -> bool:
        return self._cell.decide(self._cell.announce(start), start)


class LookedEarly(ColdCell):
    """A twin that looks what was announced before it has pinned anything."""

    def __init__(self, cell: ColdCell) -> None:
        self._cell = cell
        self._seen: ColdTier | None = None

    def read(self) -> ColdTier | None:
        self._seen = self._seen or self._cell.read()
        return self._seen


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_twins_that_say_it_too_late_or_look_too_early_are_caught(kind: Kind) -> None:
    position = base(kind).firsts[1] + 1
    assert explored(kind, position, announced=AnnouncedLate)
    assert explored(kind, position, looking=LookedEarly)


class DecidedAnyway:
    """A twin that takes no notice of others that announced something since."""

    def __init__(self, cell: ColdCell) -> None:
        self._cell = cell

    def is_undecided(self) -> bool:
        return self._cell.is_undecided()

    def announce(self, start: int) -> int:
        return self._cell.announce(start)

    def decide(self, number: int, start: int) -> bool:
        self._cell.decide(number, start)
        return True


def with_a_tierer_that_was_replaced(kind: Kind, announced: Any = None, every: int = 1) -> list[str]:
    """A slot is created while one tierer expires, and another that has taken over does the same."""
    position = base(kind).firsts[1] + 1
    wrong: list[str] = []

    def play(turns: list[tuple[int, int]]) -> dict[int, int]:
        scene = Scene(kind, position)
        late, new = scene.tierer(announced), scene.tierer(announced)
        taken = run(turns, scene.order, [scene.create, lambda: expire(late), lambda: expire(new)])
        found = scene.judge()
        if found is not None:
            wrong.append(f"{turns}: {found}")
        return taken

    taken = play([(0, 999), (1, 999)])
    alone = play([(1, 999), (0, 999)])
    orders = [
        [(0, before), (1, i), (0, j), (2, 999), (0, 999), (1, 999)]
        for before in range(max(taken[0], alone[0]))
        for i in range(1, alone[1] + 1)
        for j in (1, 2, 3)
    ]
    for turns in orders[::every]:
        play(turns)
        if wrong:
            break
    return wrong


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tierer_that_was_replaced_does_not_remove_what_the_new_one_has_promised(kind: Kind, every: int) -> None:
    assert with_a_tierer_that_was_replaced(kind, every=1 if every == 1 else 37) == []


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["wal", pytest.param("object", marks=pytest.mark.slow)])
def test_a_tierer_that_decides_though_another_has_announced_is_caught(kind: Kind) -> None:
    assert with_a_tierer_that_was_replaced(kind, DecidedAnyway)


@pytest.mark.matrix
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_on_what_the_log_itself_is_just_forgetting_keeps_what_it_needs(kind: Kind, every: int) -> None:
    def play(turns: list[tuple[int, int]]) -> dict[int, int]:
        scene = Scene(kind, base(kind).firsts[3] + 1)  # still hot, and in a segment, too
        tierer = scene.tierer()

        def forget_and_expire() -> None:
            hot = scene.tiers.hot(scene.store)
            if kind == "wal":
                hot.trim(hot.bounds().next)
            else:
                hot.set_retention(MaxBytes(1))
                hot.trim(grace=0.0)
            scene.order.point()
            expire(tierer)

        taken = run(turns, scene.order, [scene.create, forget_and_expire])
        assert scene.judge() is None, turns
        return taken

    alone = [play([(first, 999)]) for first in (0, 1)]
    steps = [max(taken[task] for taken in alone) for task in (0, 1)]
    orders = [
        [(first, i), (1 - first, j), (first, 999)]
        for first in (0, 1)
        for i in range(1, steps[first] + 1)
        for j in range(1, steps[1 - first] + 1)
    ]
    for turns in orders[::every]:
        play(turns)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [*some(range(15), 5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 200))]
)
def test_slots_and_tierers_in_any_order_keep_what_they_promised(kind: Kind, seed: int) -> None:
    scene = Scene(kind, base(kind).firsts[1] + 1)
    scene.order = Interleaver(seed)
    tierers = [scene.tierer(), scene.tierer()]
    scene.order.run([scene.create, *(partial(expire, tierer) for tierer in tierers)])
    assert scene.judge() is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_announcement_of_a_dead_tierer_is_decided_by_the_next_one(kind: Kind) -> None:
    tiers = base(kind).copy()
    log = tiers.tiered()
    first, end = tiers.firsts[1], len(tiers.truth)
    log.slots.create("billing", first)
    tiers.cell().announce(end)
    with pytest.raises(CursorExpired, match="about to be removed"):
        log.slots.create("audit", first + 1)
    with pytest.raises(CursorExpired, match="about to be removed"):
        log.slots.reset("billing", first + 1)
    assert rows(log.read(Cursor(log.log_id, 0))) == tiers.truth
    tiers.tier(retention=Consumed())
    assert log.bounds().first == first
    assert log.slots.create("audit", first + 1).position == first + 1
    log.slots.drop("audit")
    tiers.cell().announce(end)
    tiers.tier()  # though its policy keeps everything
    assert log.slots.create("audit", first + 1).position == first + 1
