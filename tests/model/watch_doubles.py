"""The doubles of the model of a watch: all of them act on the current world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pyarrow as pa

from strandline.errors import CursorExpired, Diverged, Gap, InvalidInput, NotReady, StorageError, StrandlineError
from strandline.followers.watch.exports import Exports
from strandline.kv.contract import Ended, KeyListing, Listed
from strandline.model.cursor import Cursor
from strandline.model.keyed import Scope, Update, Updates
from strandline.model.records import Op
from strandline.model.sink import StorePosition, remaining
from tests.model.watch_environment import Change, Fold, Subscribed, World, changed, stream_id, within


class Stage:
    """The world that the doubles act on: the explorer sets it before each move."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.world: World
        self.given: dict[object, Updates] = {}  # equal updates are one object, with one table


class ModelWatcher:
    """A source that numbers its changes, drops old ones, and may be created again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @property
    def stream(self) -> UUID:
        return stream_id(self.stage.world.stream)

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> ModelSubscription:
        world = self.stage.world
        end = len(world.changes)
        if cursor is None:
            self._barrier(world, scope)
            world.subscribed = Subscribed(world.stream, end, world.current(scope))
        elif cursor.log_id != self.stream or not world.first <= cursor.next <= end:
            raise CursorExpired("expired")
        else:
            world.subscribed = Subscribed(world.stream, cursor.next, None)
        return ModelSubscription(self.stage)

    def _barrier(self, world: World, scope: Scope) -> None:
        if world.listed is not None and any(key not in world.listed for key, _ in within(world.fold.content, scope)):
            world.breaks("The full watch is opened before what vanished was removed from the store.")


class ModelSubscription:
    """A subscription to the source; its position is in the world."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def take(self, most: int, timeout: float) -> Updates | Listed | Ended | None:
        world = self.stage.world
        at = world.subscribed
        assert at is not None
        stream = stream_id(at.stream)
        if at.current:
            rows, rest = at.current[:most], at.current[most:]
            world.subscribed = replace(at, current=rest)
            return self._updates(tuple((v, (k, value)) for v, k, value in rows), Cursor(stream, rows[-1][0] + 1))
        if at.current is not None:
            world.subscribed = replace(at, current=None)
            return Listed(Cursor(stream, at.position))
        if at.stream != world.stream or at.position < world.first:
            raise Gap("overrun")
        rows, upto = [], at.position
        for version, change in enumerate(world.changes[at.position :], at.position):
            if change[0] in self.stage.scope:
                if len(rows) == most:
                    break
                rows.append((version, change))
            upto = version + 1
        if upto == at.position:
            return None
        world.subscribed = replace(at, position=upto)
        return self._updates(tuple(rows), Cursor(stream, upto))

    def _updates(self, rows: tuple[tuple[int, Change], ...], upto: Cursor) -> Updates:
        known = self.stage.given.get((rows, upto))
        if known is None:
            ops = [Op.DELETE if change[1] is None else Op.PUT for _, change in rows]
            keys, values = [change[0] for _, change in rows], [change[1] for _, change in rows]
            known = Updates(ops, keys, values, [version for version, _ in rows], upto)
            self.stage.given[rows, upto] = known
        return known

    def close(self) -> None:
        """Nothing to do: the world drops it when the watch ends."""


class ModelReader:
    """Lists what is present at the moment of the call, or fails."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def listing(self, scope: Scope) -> KeyListing:
        world = self.stage.world
        if world.fate != "well":
            raise StorageError("The listing failed.")
        live = frozenset(key for _, key, _ in world.current(scope))
        world.listed = live
        return KeyListing(live, frozenset(key for key, _ in world.changes if key in scope) - live)


class ModelStore:
    """A fold with atomic writes, of which one may fail: with nothing stored, or although it was stored."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def position(self) -> StorePosition:
        return StorePosition(self.stage.world.fold.cursor, self.stage.world.fold.resync)

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return (pair for pair in self.stage.world.fold.content if pair[0].startswith(prefix))

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        fold = self.stage.world.fold
        if fold.resync is not None:
            self._refuse(NotReady("A range came in the middle of a resync."))
        if fold.cursor is not None and fold.cursor.log_id != upto.log_id:
            self._refuse(Diverged("A range came of another stream."))
        try:
            rows = remaining(records, since=since, upto=upto, at=fold.cursor)
        except Gap as gap:
            self._refuse(gap)
        self._commit(fold if rows is None else Fold(changed(fold.content, _changes(rows)), upto))

    def begin_resync(self, stream: UUID) -> None:
        self._commit(replace(self.stage.world.fold, resync=stream))

    def resync(self, records: pa.Table) -> None:
        fold = self.stage.world.fold
        if fold.resync is None:
            self._refuse(InvalidInput("No resync was begun."))
        self._commit(replace(fold, content=changed(fold.content, _changes(records))))

    def end_resync(self, cursor: Cursor) -> None:
        fold = self.stage.world.fold
        if fold.resync != cursor.log_id:
            self._refuse(InvalidInput("No resync of this stream was begun."))
        self._commit(Fold(fold.content, cursor))

    def export_to(self, folder: str) -> None:
        world = self.stage.world
        if world.fold.resync is not None or world.fold.cursor is None:
            raise NotReady("Nothing to export yet.")
        if within(world.fold.content, self.stage.scope) != world.applied:
            world.breaks("An export was served, and its data is not what was applied.")

    def left(self, fold: Fold) -> Fold:
        """What outlives the process: all of it."""
        return fold

    def _commit(self, fold: Fold) -> None:
        world = self.stage.world
        if world.fate == "nothing stored":
            raise StorageError("Nothing was stored.")
        if fold != world.fold:
            world.before, world.fold = world.fold, fold
        if world.fate == "stored":
            raise StorageError("The answer was lost.")

    def _refuse(self, error: StrandlineError) -> None:
        self.stage.world.breaks(f"The store refuses a write: {error}")
        raise error


def _changes(records: pa.Table) -> tuple[Change, ...]:
    ops, keys, values = (records.column(name).to_pylist() for name in ("op", "key", "value"))
    rows = zip(ops, keys, values, strict=True)
    return tuple((key, (value or b"") if op == int(Op.PUT) else None) for op, key, value in rows)


class ModelApply:
    """Applies batches to the world and checks their order."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def __call__(self, batch: Updates) -> None:
        world = self.stage.world
        for update in batch:
            self._in_order(world, update)
            world.applied = changed(world.applied, ((update.key, update.value),))

    def _in_order(self, world: World, update: Update) -> None:
        if update.key not in self.stage.scope:
            world.breaks(f"{update.key!r} is out of scope and was applied.")
        if update.value is not None:
            world.put_in_run |= {update.key}
        elif update.version is None and update.key in world.put_in_run:
            world.breaks(f"The removal of {update.key!r} came after it was listed again.")


class ModelExports(Exports):
    """The requests for exports."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def taken(self) -> list[ModelRequest]:
        asked, self.stage.world.asked = self.stage.world.asked, 0
        return [REQUEST] * asked


class ModelRequest:
    """A request whose result is ignored."""

    folder = "somewhere"

    @property
    def answer(self) -> ModelRequest:
        return self

    def set_running_or_notify_cancel(self) -> bool:
        return True

    def set_result(self, result: object) -> None:
        """Ignore the result."""

    def set_exception(self, error: BaseException) -> None:
        """Ignore the error."""


REQUEST = ModelRequest()


class ModelClock:
    """Time that only passes when the explorer says so."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def monotonic(self) -> float:
        return self.stage.world.now

    def sleep(self, seconds: float) -> None:
        """Time passes by a move of its own."""
