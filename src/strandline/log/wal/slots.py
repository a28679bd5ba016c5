"""Slots and start offset of a write-ahead log: one small file, replaced atomically."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

from strandline.formats.wal.folder import Kept, encode_kept
from strandline.log import slots as rules
from strandline.log.slot_table import SlotTable
from strandline.log.slots import invalidate, judge
from strandline.log.wal.names import KEPT, NEW
from strandline.model.cursor import SECOND, Bounds, Cursor
from strandline.model.retention import NO_LIMITS, InvalidReason, SlotLimits, SlotState
from strandline.model.segments import COLD_FILE
from strandline.storage.clock import Clock
from strandline.storage.disk import Disk, exists, replace_file
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.metrics import INVALIDATIONS

_LOGGER: Final = logging.getLogger(__name__)


def write_kept(folder: str, kept: Kept, *, disk: Disk) -> None:
    """Durably replace ``slots.json``."""
    replace_file(disk, f"{folder}/{KEPT}", encode_kept(kept), temporary=f"{folder}/{KEPT}{NEW}")


@bound_to_process(close=(), keep=("log_id", "after_fork"))
@final
class WalSlots(SlotTable):
    """Slots that are written before anything is answered that must not be lost. Safe in threads.

    Positions are written lazily: with the next change that cannot wait, before the log forgets anything, and when it is
    closed. After a crash a slot may stand further back than it stood: then more is kept than is needed, never less.
    """

    def __init__(
        self,
        folder: str,
        kept: Kept,
        bounds: Callable[[], Bounds],
        cursor_at: Callable[[int], Cursor],
        check_in_place: Callable[[], None],
        *,
        origin: Origin,
        disk: Disk,
        clock: Clock,
    ) -> None:
        """The slots that were found beside the log, whose ``bounds`` and cursors they are compared with.

        ``check_in_place`` raises before anything is written where the log is no more.
        """
        super().__init__(kept.log_id, kept.slots, bounds, origin=origin, clock=clock)
        self._folder = folder
        self._start = kept.start
        self._cursor_at = cursor_at
        self._check_in_place = check_in_place
        self._disk = disk
        self._dirty = False
        self._opened = clock.monotonic()
        self._heard: dict[str, float] = {}
        """When each was last seen, on a clock that never jumps; not before the log was opened."""
        self._refusal: Callable[[], Exception] | None = None
        """Why nothing may be changed any more."""

    def _retained(self) -> Bounds:
        """What a slot may be put on: readers may not have been told yet of what was just decided to go."""
        bounds = self._bounds()
        return Bounds(max(bounds.first, self._start), bounds.next)

    def trim_floor(self) -> int | None:
        """How far the log may forget."""
        with self._lock:
            return rules.trim_floor(self.proven())

    def proven(self) -> list[SlotState]:
        """The slots by what they prove: a restored log may have a cold tier that is not of its own history."""
        with self._lock:
            return rules.proven(self._slots.values(), self._copied())

    def _copied(self) -> rules.Copied:
        return rules.Copied(
            self._retained(),
            lambda: exists(f"{self._folder}/{COLD_FILE}", disk=self._disk),
            lambda at: self._cursor_at(at).fingerprint,
        )

    def _idle_seconds(self, name: str) -> float:
        """For how many seconds a slot's holder was not seen, as far as could be seen since the log was opened."""
        return self._clock.monotonic() - self._heard.get(name, self._opened)

    def enforce(self, limits: SlotLimits, bytes_behind: Callable[[int], int]) -> list[SlotState]:
        """Durably drop expired slots and invalidate those that break a limit; logs each, returns the invalidated.

        ``bytes_behind`` gives the bytes stored from a position on. A slot that moves meanwhile is left alone.
        """
        for state in self._expire():
            _LOGGER.warning(
                "Slot %r of %s was dropped: its consumer has not claimed it, and was not seen for %g minutes.",
                state.name, self._folder, ((state.expires or 0) - state.last_seen) / SECOND / 60,
            )  # fmt: skip
        if limits == NO_LIMITS:
            return []
        first = rules.retained_first(self.proven(), self._bounds().first)
        judged: list[tuple[SlotState, InvalidReason]] = []
        behind: dict[str, int] = {}
        for state in self.list():
            behind[state.name] = bytes_behind(state.position) if limits.lag_bytes and state.pins else 0
            is_idle = self._idle_seconds(state.name) > limits.idle_seconds
            reason = judge(state, first=first, behind=behind[state.name], limits=limits, is_idle=is_idle)
            if reason is not None:
                judged.append((state, reason))
        invalidated = self._invalidate_judged(judged) if judged else []
        for state in invalidated:
            why = None if state.invalid is None else state.invalid.reason
            INVALIDATIONS.labels(str(why)).inc()
            _LOGGER.warning(
                "Slot %r of %s was invalidated (%s) at offset %d, with %d bytes behind it: what it needs may be gone. "
                "Bootstrap its consumer again and reset the slot.",
                state.name, self._folder, why, state.position, behind[state.name],
            )  # fmt: skip
        return invalidated

    def _expire(self) -> list[SlotState]:
        """Durably drop the slots that expire, and whose consumers were not seen for their whole time; returns them."""
        with self._changing():
            gone = [
                state
                for state in self._slots.values()
                if state.expires is not None
                and not state.dropped
                and self._idle_seconds(state.name) * SECOND >= state.expires - state.last_seen
            ]
            if gone:
                dropped = {state.name: rules.drop(state, state.epoch) for state in gone}
                self._write(self._start, {**self._slots, **dropped})
            return gone

    def invalidate(self, name: str, reason: InvalidReason) -> SlotState:
        """Durably take a slot's pin away, with a reason."""
        with self._changing():
            before = self.get(name)
            return self._store(invalidate(before, before, reason, self._clock.now()))

    def _invalidate_judged(self, judged: Sequence[tuple[SlotState, InvalidReason]]) -> list[SlotState]:
        """Durably take the pins of slots that are still as they were judged, all at once; returns those."""
        with self._changing():
            now, slots = self._clock.now(), dict(self._slots)
            for state, reason in judged:
                slots[state.name] = invalidate(self._slots[state.name], state, reason, now)
            changed = [state for name, state in slots.items() if state != self._slots[name]]
            if changed:
                self._write(self._start, slots)
            return changed

    def retain(self, start: int, *, beyond_slots: bool) -> int:
        """Durably let the log begin at ``start``, with all positions; returns where it begins now.

        Never above what slots allow, unless told so: then those that needed more are invalidated with the
        same write.
        """
        with self._changing():
            if beyond_slots:
                now = self._clock.now()
                behind = {state.name for state in rules.outrun(self.proven(), start)}
                judged = {
                    state.name: invalidate(state, state, InvalidReason.WAL_REMOVED, now)
                    for state in self._slots.values()
                    if state.name in behind
                }
                slots = {**self._slots, **judged}
            else:
                slots = self._slots
                floor = rules.trim_floor(self.proven())
                start = start if floor is None else min(start, floor)
            if start > self._start:
                self._write(start, slots)
            return self._start

    def check_open(self) -> None:
        """Raise why nothing may be changed any more, if that is so."""
        if self._refusal is not None:
            raise self._refusal()

    def close(self, refusal: Callable[[], Exception]) -> None:
        """Write the positions that were only noted, and refuse every later change; nothing comes between the two."""
        with self._lock:
            self._refusal = refusal
            self._flush()

    def after_fork(self, refusal: Callable[[], Exception]) -> None:
        """In a child, where the lock may be held by nobody: let nobody wait for it who is being refused."""
        self._lock = threading.RLock()
        self._refusal = refusal

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self.check_open()  # with the lock: closing does not come between
            yield

    def _hear(self, name: str) -> None:
        self._heard[name] = self._clock.monotonic()

    def _flush(self) -> None:
        if self._dirty:
            self._write(self._start, self._slots)

    def _note(self, state: SlotState) -> None:
        if self._slots[state.name] != state:
            self._slots[state.name] = state
            self._dirty = True

    def _store(self, state: SlotState) -> SlotState:
        self._write(self._start, {**self._slots, state.name: state})
        return state

    def _write(self, start: int, slots: dict[str, SlotState]) -> None:
        """Durably replace the file; only then does anyone see what is in it."""
        self._check_in_place()
        self._dirty = True  # until it is known to be written: an error leaves either
        write_kept(self._folder, Kept(self.log_id, start, tuple(slots.values())), disk=self._disk)
        self._start, self._slots, self._dirty = start, dict(slots), False
