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
from tests.model.stage import ModelStore, ModelSubscription, ModelWatcher
from tests.model.world import Fold


class DropsTheFailedBatch(Engine):
    """What the store did not take is not tried again."""

    __slots__ = ()

    def step(self, event: Event, now: float) -> Action:
        if event is Signal.STORE_FAILED:
            self._unstored.popleft()
        return Engine.step(self, event, now)


class PutsTheFailedBatchBehind(Engine):
    """What the store did not take goes after what came later."""

    __slots__ = ()

    def _enqueue(self) -> None:
        last = self._unstored[-1] if self._unstored else None
        Engine._enqueue(self)
        joined = self._unstored[-1]
        if isinstance(last, AppliedRange) and isinstance(joined, AppliedRange):
            chunks = joined.chunks[len(last.chunks) :] + joined.chunks[: len(last.chunks)]  # type: ignore[operator]
            self._unstored[-1] = replace(joined, chunks=chunks)


class ResumesFromMemory(AppliedWatch):
    """Goes on after what it had received, not after what the store has taken."""

    def remembered(self) -> Cursor | None:
        return self.engine._read

    def _begin(self, resume: Resume) -> Began:
        memory = self.clock.stage.world.memory  # type: ignore[attr-defined]
        return AppliedWatch._begin(self, resume) if memory is None else Began(memory)


class ReportsBeforeStoring(Engine):
    """Says how far it got when it was applied."""

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
    """Opens the full watch before the removals are applied and stored."""

    __slots__ = ()

    def _resync_onward(self) -> Action:
        if self.phase is Phase.CLEARING:
            if self._compared:
                return Open(None)
            self._compared = True
            return FindVanishedKeys()
        return Engine._resync_onward(self)


class DoesNotSweep(Engine):
    """Ends the resync when everything is listed again."""

    __slots__ = ()

    def _resync_onward(self) -> Action:
        if self.phase is Phase.RELISTING and self._listed is not None:
            self.phase = Phase.SWEEPING
            self._unstored.append(EndResync(self._listed))
            return StoreBatch(self._unstored[0])
        return Engine._resync_onward(self)


class AppliesNoRemovals(Engine):
    """Tells the store of what vanished, and not whoever applies."""

    __slots__ = ()

    def _apply(self, write: AppliedRange | ResyncWrite) -> Apply:
        action = Engine._apply(self, write)
        return Apply([]) if self.phase in (Phase.CLEARING, Phase.SWEEPING) else action


class ExportsAtOnce(Engine):
    """Serves exports although something applied has not been stored."""

    __slots__ = ()

    def _next(self, now: float) -> Action:
        if self._exports and self.phase is Phase.LIVE:
            return Export(self._exports.popleft())
        return Engine._next(self, now)


class EndsAResyncTwice(AppliedWatch):
    """Does not look whether a resync has ended when only the answer was lost."""

    def _write(self, store: ModelStore, write: Write) -> None:  # type: ignore[override]
        if isinstance(write, EndResync):
            store.end_resync(write.cursor)
        else:
            AppliedWatch._write(self, store, write)  # type: ignore[arg-type]


class KeepsTheFlagInMemory(ModelStore):
    """Forgets with its process that a resync is under way."""

    def left(self, fold: Fold) -> Fold:
        return replace(fold, resync=None)


class ClampsSilently(ModelWatcher):
    """Begins with what it still has, if what was asked for is gone."""

    def watch_from(self, scope, cursor):
        world = self.stage.world
        if cursor is not None and cursor.log_id == self.stream and cursor.next < world.first:
            cursor = cursor.at(world.first)
        return ModelWatcher.watch_from(self, scope, cursor)


class LooksAway(ModelWatcher):
    """Not broken, but does not look whether a resync has its barrier: what comes of that is seen later."""

    def _barrier(self, world, scope):
        """Whatever it is."""


class JumpsOverGaps(ModelWatcher):
    """Goes on behind what retention took from a watch that was too slow."""

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
