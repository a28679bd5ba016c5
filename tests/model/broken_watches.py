"""Watches, engines and stores that are broken on purpose, each in one rule. The model must find every one."""

from __future__ import annotations

from dataclasses import replace

from strandline.followers.engine import Engine, Phase
from strandline.followers.events import (
    Action,
    AppliedRange,
    Apply,
    Began,
    EndResync,
    Event,
    Export,
    FindVanishedKeys,
    Open,
    ReportCursor,
    ResyncWrite,
    Signal,
    StoreBatch,
    Write,
)
from strandline.followers.watch.run import AppliedWatch, Resume
from strandline.model.cursor import Cursor
from tests.model.watch_doubles import ModelStore, ModelSubscription, ModelWatcher
from tests.model.watch_environment import Fold


class DropsTheFailedBatch(Engine):
    """Broken: does not retry a batch that the store did not take."""

    __slots__ = ()

    def step(self, event: Event, now: float) -> Action:
        if event is Signal.STORE_FAILED:
            self._unstored.popleft()
        return Engine.step(self, event, now)


class PutsTheFailedBatchBehind(Engine):
    """Broken: retries a failed batch after the batches that came later."""

    __slots__ = ()

    def _enqueue(self) -> None:
        last = self._unstored[-1] if self._unstored else None
        Engine._enqueue(self)
        joined = self._unstored[-1]
        if isinstance(last, AppliedRange) and isinstance(joined, AppliedRange):
            chunks = joined.chunks[len(last.chunks) :] + joined.chunks[: len(last.chunks)]  # type: ignore[operator]
            self._unstored[-1] = replace(joined, chunks=chunks)


class ResumesFromMemory(AppliedWatch):
    """Broken: resumes after what it received, not after what the store has taken."""

    def remembered(self) -> Cursor | None:
        return self.engine._read

    def _begin(self, resume: Resume) -> Began:
        memory = self.env.clock.stage.world.memory  # type: ignore[attr-defined]
        return AppliedWatch._begin(self, resume) if memory is None else Began(memory)


class ReportsBeforeStoring(Engine):
    """Broken: reports a position as soon as it is applied."""

    __slots__ = ()

    def _enqueue(self) -> None:
        Engine._enqueue(self)
        write = self._unstored[-1]
        if isinstance(write, AppliedRange):
            self.applied = write.upto

    def _storable(self) -> Write | None:
        return self._unstored[0] if self._unstored else None

    def _stored(self) -> Action | None:
        write = self._unstored[0]
        Engine._stored(self)
        return ReportCursor(write.upto) if isinstance(write, AppliedRange) else None


class HasNoBarrier(Engine):
    """Broken: opens the full watch before the removals are applied and stored."""

    __slots__ = ()

    def _resync_onward(self) -> Action:
        if self.phase is Phase.CLEARING:
            if self._compared:
                return Open(None)
            self._compared = True
            return FindVanishedKeys()
        return Engine._resync_onward(self)


class DoesNotSweep(Engine):
    """Broken: ends the resync once everything is listed, without removing what vanished."""

    __slots__ = ()

    def _resync_onward(self) -> Action:
        if self.phase is Phase.RELISTING and self._listed is not None:
            self.phase = Phase.SWEEPING
            self._unstored.append(EndResync(self._listed))
            return StoreBatch(self._unstored[0])
        return Engine._resync_onward(self)


class AppliesNoRemovals(Engine):
    """Broken: removes vanished keys from the store and does not apply the removals."""

    __slots__ = ()

    def _apply(self, write: AppliedRange | ResyncWrite) -> Apply:
        action = Engine._apply(self, write)
        return Apply([]) if self.phase in (Phase.CLEARING, Phase.SWEEPING) else action


class ExportsAtOnce(Engine):
    """Broken: serves exports while something applied is not stored yet."""

    __slots__ = ()

    def _next(self, now: float) -> Action:
        if self._exports and self.phase is Phase.LIVE:
            return Export(self._exports.popleft())
        return Engine._next(self, now)


class EndsAResyncTwice(AppliedWatch):
    """Broken: does not check whether a resync has ended when only the answer was lost."""

    def _write(self, store: ModelStore, write: Write) -> None:  # type: ignore[override]
        if isinstance(write, EndResync):
            store.end_resync(write.cursor)
        else:
            AppliedWatch._write(self, store, write)  # type: ignore[arg-type]


class KeepsTheFlagInMemory(ModelStore):
    """Broken: keeps the flag of a running resync in memory only."""

    def left(self, fold: Fold) -> Fold:
        return replace(fold, resync=None)


class ClampsSilently(ModelWatcher):
    """Broken: begins with the oldest retained change if the requested one is gone."""

    def watch_from(self, scope, cursor):
        world = self.stage.world
        if cursor is not None and cursor.log_id == self.stream and cursor.next < world.first:
            cursor = cursor.at(world.first)
        return ModelWatcher.watch_from(self, scope, cursor)


class LooksAway(ModelWatcher):
    """Without the check for the barrier of a resync, so that later checks find the consequences."""

    def _barrier(self, world, scope):
        """Not checked."""


class JumpsOverGaps(ModelWatcher):
    """Broken: skips what retention took from a watch that was too slow."""

    def watch_from(self, scope, cursor):
        ModelWatcher.watch_from(self, scope, cursor)
        return _Jumping(self.stage)


class _Jumping(ModelSubscription):
    def take(self, most, timeout):
        world = self.stage.world
        at = world.subscribed
        if at.current is None and at.position < world.first:
            world.subscribed = replace(at, position=world.first)
        return ModelSubscription.take(self, most, timeout)
