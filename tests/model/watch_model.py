"""A model of ``watch_applied``: the production engine and shell, in a world where anything may happen at any point.

Nothing of the watch is written a second time here. What a move does is one turn of ``AppliedWatch.run``: do what the
engine said, and hand it what came of that. Everything that the watch touches is a double over the world; see ``stage``.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

from strandline.errors import Gap, StorageError
from strandline.followers.engine import Engine, Phase
from strandline.followers.events import Action, Batching, Event, FindVanishedKeys, Finish, Open, Pause, Receive
from strandline.followers.events import StoreBatch as StoreAction
from strandline.followers.watch.run import AppliedWatch, Resume
from strandline.model.cursor import Cursor
from strandline.model.keyed import Prefix, Scope, Updates
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from tests.model.explorer import Model, Move
from tests.model.watch_doubles import (
    ModelApply,
    ModelClock,
    ModelExports,
    ModelReader,
    ModelStore,
    ModelWatcher,
    Stage,
)
from tests.model.watch_environment import Budget, Change, Fold, World, changed, within

SCOPE = Prefix("k")
OUTSIDE = ((b"z", b"kept"),)
"""What the fold holds out of scope, and nobody may touch."""

TIGHT = Batching(records=2, window=1.0, queue=1)
RETRIES = Backoff(attempts=2, base=0.5, ceiling=0.5)


@runtime_checkable
class Remembering(Protocol):
    """A broken watch that keeps a cursor of its own beyond its process."""

    def remembered(self) -> Cursor | None: ...


@dataclass(frozen=True, slots=True)
class State:
    """The world, and the watch in it, if one runs."""

    world: World
    watch: AppliedWatch | None


@dataclass(frozen=True, slots=True)
class Scenario:
    """How large the world is, and what may happen in it.

    ``history`` was written before, and the fold followed it up to ``followed`` (None: it is a newcomer). ``script``
    fixes the order of the writes to come; without it, each is any write to any of ``keys``. With ``kept`` the state of
    ``apply`` outlives crashes, otherwise it is built from the fold when a watch begins. ``unsynced`` lets a crash take
    the store's last write with it.
    """

    budget: Budget
    history: tuple[Change, ...] = ()
    followed: int | None = None
    keys: tuple[bytes, ...] = (b"k1", b"k2")
    script: tuple[Change, ...] | None = None
    scope: Scope = SCOPE
    batching: Batching = TIGHT
    kept: bool = False
    unsynced: bool = False
    engine: type[Engine] = Engine
    watch: type[AppliedWatch] = AppliedWatch
    store: type[ModelStore] = ModelStore
    watcher: type[ModelWatcher] = ModelWatcher


@dataclass(slots=True)
class WatchModel:
    """The moves and the promises."""

    scenario: Scenario
    stage: Stage = field(init=False)
    made: Callable[[], AppliedWatch] = field(init=False)
    canon: Canon = field(init=False)

    def __post_init__(self) -> None:
        self.stage = stage = Stage(self.scenario.scope)
        self.canon = Canon()
        doubles = self.scenario.watcher(stage), ModelApply(stage), self.scenario.store(stage)
        self.made = lambda: self.scenario.watch(
            *doubles,
            self._reported,
            None,
            Env(clock=ModelClock(stage)),  # type: ignore[arg-type]
            _never,
            reader=ModelReader(stage),
            scope=self.scenario.scope,
            batching=self.scenario.batching,
            exports=ModelExports(stage),
        )

    def model(self) -> Model[State]:
        return Model(State(self._initial(), None), self.moves, self.fingerprint, self.invariant, self.final)

    def _initial(self) -> World:
        world = World(self.scenario.budget)
        for change in self.scenario.history:
            world.write(*change)
        world.fold = world.before = Fold(OUTSIDE)
        if self.scenario.followed is not None:
            at = world.end().at(self.scenario.followed)
            content = changed(OUTSIDE, within(world.state_at(at), self.scenario.scope))
            world.fold = world.before = Fold(content, at)
        world.applied = within(world.fold.content, self.scenario.scope)
        return world

    # --- moves -------------------------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move[State]]:
        yield from self._of_the_watch(state)
        yield from self._of_the_source(state)
        yield from self._of_others(state)

    def _of_the_watch(self, state: State) -> Iterator[Move[State]]:
        world, watch = state.world, state.watch
        if watch is None:
            yield Move("the watch begins", self._begun(state, "stored"), fair=True)
            if world.budget.anew:
                yield Move("the watch begins anew", self._begun(state, None))
            return
        told = describe(world.action)
        yield Move(told, self._turned(state, "well"), fair=True)
        if world.budget.failures and isinstance(world.action, StoreAction | FindVanishedKeys):
            yield Move(f"{told}: fails, nothing is stored", self._turned(state, "nothing stored"))
            if isinstance(world.action, StoreAction):
                yield Move(f"{told}: the answer is lost", self._turned(state, "stored"))
        deadlines = [due for due in (watch.engine._due, watch.engine._retry) if due is not None and due > world.now]
        if deadlines:
            later = world.copy()
            later.now = min(deadlines)
            yield Move("time passes", State(later, watch), fair=True)

    def _of_the_source(self, state: State) -> Iterator[Move[State]]:
        budget = state.world.budget
        if budget.writes:
            for key, value in self._writable(state.world):
                world = state.world.spend("writes")
                version = f"{world.stream}.{len(world.changes)}".encode()
                world.write(key, None if value is None else version)
                told = f"the source deletes {key.decode()}" if value is None else f"the source puts {key.decode()}"
                yield Move(told, State(world, state.watch))
        if budget.trims and state.world.first < len(state.world.changes):
            world = state.world.spend("trims")
            world.first = len(world.changes)
            yield Move("the source forgets its past", State(world, state.watch))
        if budget.recreations:
            world = state.world.spend("recreations")
            world.streams, world.first = (*world.streams, ()), 0
            yield Move("the source is created anew", State(world, state.watch))

    def _writable(self, world: World) -> Iterator[Change]:
        script = self.scenario.script
        if script is not None:
            yield script[len(script) - world.budget.writes]
            return
        present = dict(world.state())
        for key in self.scenario.keys:
            yield key, b""
            if key in present:
                yield key, None

    def _of_others(self, state: State) -> Iterator[Move[State]]:
        world, watch = state.world, state.watch
        if watch is None:
            return
        if world.budget.crashes:
            crashed = world.spend("crashes")
            yield Move("crash", self._gone(crashed, watch))
            if self.scenario.unsynced and world.before != world.fold:
                crashed = world.spend("crashes")
                crashed.fold = crashed.before
                yield Move("crash, and the last write is lost", self._gone(crashed, watch))
        if world.budget.stops:
            stopping = _copied(watch)
            stopping.engine.stop()
            yield Move("asked to stop", State(world.spend("stops"), stopping))
        if world.budget.exports:
            asked = world.spend("exports")
            asked.asked += 1
            yield Move("asked for an export", State(asked, watch))

    # --- turns of the watch ------------------------------------------------------------------------------------

    def _begun(self, state: State, resume: Resume) -> State:
        world = self.stage.world = state.world.copy() if resume is not None else state.world.spend("anew")
        watch = self.made()
        watch.engine = self.scenario.engine(self.scenario.batching, can_resync=watch.engine.can_resync, retries=RETRIES)
        if not self.scenario.kept:
            world.applied = within(world.fold.content, self.scenario.scope)
        world.reported = world.fold.cursor
        return self._advanced(world, watch, lambda: watch._begin(resume))

    def _turned(self, state: State, fate: str) -> State:
        assert state.watch is not None
        world = self.stage.world = state.world.copy() if fate == "well" else state.world.spend("failures")
        world.fate = fate
        watch = _copied(state.watch)
        action = world.action
        return self._advanced(world, watch, lambda: watch._do(action))

    def _advanced(self, world: World, watch: AppliedWatch, turn: Callable[[], Event]) -> State:
        """One turn of ``AppliedWatch.run``."""
        live = watch.engine.phase is Phase.LIVE
        before = world.applied
        try:
            event = turn()
            watch._take_requests()
            action = watch.engine.step(event, world.now)
            if isinstance(action, Finish):
                return self._finished(world, watch, action)
        except (Gap, StorageError):
            return self._gone(world, watch)
        except Exception as error:  # noqa: BLE001 - nothing else may come out of a watch here
            world.breaks(f"The watch ends with {type(error).__name__}: {error}")
            return self._gone(world, watch)
        if isinstance(world.action, Open):
            self._mark(world, watch)
        if live and world.applied != before and not self.scenario.kept:
            self._applied_live(world, watch)
        world.action, world.fate = action, "well"
        return State(world, watch)

    def _mark(self, world: World, watch: AppliedWatch) -> None:
        at = world.subscribed
        if at is not None and at.current is not None and watch.engine.phase is Phase.LIVE:
            world.mark = world.end().at(at.position)

    def _applied_live(self, world: World, watch: AppliedWatch) -> None:
        upto = watch.joined[1].upto if watch.joined is not None else None
        if upto is not None and world.differs(world.applied, upto, self.scenario.scope):
            world.breaks(f"What was applied up to {upto.next} is not the source's state there.")

    def _finished(self, world: World, watch: AppliedWatch, action: Finish) -> State:
        returned = watch._finished(action)
        if returned != world.fold.cursor:
            world.breaks(f"The watch returns {returned}, and the store is at {world.fold.cursor}.")
        return self._gone(world, watch)

    def _gone(self, world: World, watch: AppliedWatch) -> State:
        """Nothing of the watch is left but the world."""
        world.subscribed = world.reported = world.action = world.listed = None
        world.fold = watch.store.left(world.fold)  # type: ignore[union-attr]
        world.put_in_run = frozenset()
        world.now, world.asked, world.fate = 0.0, 0, "well"
        if isinstance(watch, Remembering):
            world.memory = watch.remembered()
        return State(world, None)

    def _reported(self, cursor: Cursor) -> None:
        world = self.stage.world
        if world.reported is not None and not exceeds(cursor, world.reported):
            world.breaks(f"{cursor.next} was reported after {world.reported.next}.")
        stored = world.fold.cursor
        if world.fold.resync is not None or stored is None or exceeds(cursor, stored):
            world.breaks(f"{cursor.next} was reported, and the store has not taken it.")
        world.reported = cursor

    # --- promises ----------------------------------------------------------------------------------------------

    def invariant(self, state: State) -> str | None:
        world, fold, scope = state.world, state.world.fold, self.scenario.scope
        if world.broken is not None:
            return world.broken
        if tuple(pair for pair in fold.content if pair[0] not in scope) != OUTSIDE:
            return "Keys out of scope were touched in the store."
        if fold.resync is None and fold.cursor is None and within(fold.content, scope):
            return "The store holds something, and has no cursor."
        if fold.resync is None and fold.cursor is not None and world.differs(fold.content, fold.cursor, scope):
            return f"The store is at {fold.cursor.next}, and holds something else than the source did there."
        applied = None if state.watch is None else state.watch.engine.applied
        if applied is not None and (fold.cursor is None or exceeds(applied, fold.cursor)):
            return f"The applied cursor {applied.next} is beyond the store's."
        return None

    def final(self, state: State) -> str | None:
        world, scope = state.world, self.scenario.scope
        there = within(world.state(), scope)
        if state.watch is None or not isinstance(world.action, Receive):
            return "Nothing goes on, and the watch does not wait for changes."
        if world.fold.resync is not None:
            return "Everything is quiet, and the resync is not done."
        if within(world.fold.content, scope) != there:
            return "Everything is quiet, and the store is not in step with the source."
        if world.applied != there:
            return "Everything is quiet, and what apply holds is not in step with the source."
        if state.watch.waiting or world.asked:
            return "Everything is quiet, and an export was not answered."
        return None

    def fingerprint(self, state: State) -> bytes:
        world, watch = state.world, state.watch
        canon = self.canon
        parts: list[Any] = [canon(getattr(world, name)) for name in _TOLD]
        if self.scenario.unsynced:
            parts.append(canon(world.before))
        if watch is not None:
            engine = watch.engine
            parts += [canon(getattr(engine, name)) for name in _REMEMBERED]
            parts += [_until(engine._due, world.now), _until(engine._retry, world.now)]
            parts += [len(watch.waiting), canon(watch.ahead)]
        return blake2b(marshal.dumps(tuple(parts), 2), digest_size=16).digest()


_UNTOLD = {"now", "before", "fate"}
_TOLD = tuple(one.name for one in fields(World) if one.name not in _UNTOLD)
_CONSTANT = {"batching", "upto", "can_resync", "retries", "_due", "_retry"}
_REMEMBERED = tuple(one.name for one in fields(Engine) if one.name not in _CONSTANT)


def exceeds(cursor: Cursor, stored: Cursor) -> bool:
    """Whether a cursor is above the store's. One of an earlier stream is below every one of a later stream."""
    return cursor.log_id.int > stored.log_id.int or (cursor.log_id == stored.log_id and cursor.next > stored.next)


def _until(due: float | None, now: float) -> float | None:
    return None if due is None else max(0.0, due - now)


def _never(_: object) -> None:
    raise AssertionError("nothing is awaited here")


def _copied(watch: AppliedWatch) -> AppliedWatch:
    """Another watch of the same state. Chunks, writes and actions are values, and shared."""
    made = copy(watch)
    made.engine = engine = copy(watch.engine)
    made.waiting = list(watch.waiting)
    for name in ("_pending", "_unstored", "_removals", "_marks", "_exports"):
        setattr(engine, name, getattr(engine, name).copy())
    return made


class Canon:
    """Values as nested tuples that are equal exactly if the values are, and that can be written as bytes.

    What can never change is looked at once: states share most of it.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _CHANGING:
            return tuple(map(self, sorted(value) if kind is set else value))
        known = self.known.get(id(value))
        if known is None:
            known = (value, self._of(value))
            self.known[id(value)] = known  # which keeps it alive, and its number its own
        return known[1]

    def _of(self, value: Any) -> Any:  # noqa: PLR0911 - one case for each kind
        match value:
            case Updates():
                ops, *columns = value.columns
                return (tuple(map(int, ops)), *map(tuple, columns), self(value.upto))
            case Cursor():
                return (value.log_id.int, value.next)
            case tuple():
                return tuple(map(self, value))
            case frozenset():
                return tuple(sorted(value))
            case UUID():
                return value.int
            case Receive(records=records):
                return ("Receive", records)
            case Pause() | Enum():
                return str(type(value)) + getattr(value, "name", "")
        if is_dataclass(value):
            return (type(value).__name__, *(self(getattr(value, one.name)) for one in fields(value)))
        return type(value).__name__


_PLAIN = frozenset({type(None), int, bool, str, bytes, float})
_CHANGING = frozenset({list, deque, set})


def describe(action: Action) -> str:
    """An action in a few words, for a trace."""
    told = [type(action).__name__]
    for value in (getattr(action, one.name) for one in fields(action)):
        told += _words(value)
    return " ".join(told)


def _words(value: Any) -> Sequence[str]:
    match value:
        case Cursor():
            return [f"@{value.next}"]
        case Updates():
            return ["[" + ", ".join(f"{'-' if row.value is None else '+'}{row.key.decode()}" for row in value) + "]"]
        case list() | tuple():
            return [word for part in value for word in _words(part)]
        case frozenset():
            return [f"{{{', '.join(sorted(key.decode() for key in value))}}}"]
        case _ if (
            is_dataclass(value) and not isinstance(value, type) and type(value).__module__ == StoreAction.__module__
        ):
            return [describe(value)]
    return []
