"""Slots and start offset of a write-ahead log: one small file, replaced atomically."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, final

from strandline.formats.wal.folder import SlotsFile, encode_slots_file
from strandline.log.slots import rules, trimming
from strandline.log.slots.rules import invalidate, reason_to_invalidate
from strandline.log.slots.slot_metrics import report_invalid
from strandline.log.slots.table import SlotTable, TableSlot
from strandline.log.wal.names import NEW, SLOTS_FILE
from strandline.model.addresses import CONSUMER_SUFFIX, COPIED_SUFFIX
from strandline.model.cursor import SECOND, Bounds, Cursor
from strandline.model.retention import NO_LIMITS, TIER_SLOT, InvalidReason, SlotLimits, SlotState
from strandline.model.segments import COLD_FILE
from strandline.storage.disk import Disk, exists, replace_file
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process

_LOGGER: Final = logging.getLogger(__name__)

MOST_DROPPED: Final = 1000
"""Dropped slots that are remembered, to fence former holders of their names: each is written with every change."""


def write_slots_file(folder: str, kept: SlotsFile, *, disk: Disk) -> None:
    """Durably replace ``slots.json``."""
    replace_file(disk, f"{folder}/{SLOTS_FILE}", encode_slots_file(kept), temporary=f"{folder}/{SLOTS_FILE}{NEW}")


@bound_to_process(close=(), keep=("log_id",))
@final
class WalSlots(SlotTable):
    """Slots that are durable before a change is answered. Safe in threads.

    Positions are written lazily: with the next change that cannot wait, before a trim, and on closing. After a crash a
    slot may be at an earlier position: then more is retained than needed, never less.
    """

    def __init__(
        self,
        folder: str,
        kept: SlotsFile,
        bounds: Callable[[], Bounds],
        cursor_at: Callable[[int], Cursor],
        check_in_place: Callable[[], None],
        *,
        origin: Origin,
        env: Env,
    ) -> None:
        """The stored slots of a log, whose ``bounds`` and cursors they are compared with.

        ``check_in_place`` raises before a write if the log was moved or replaced.
        """
        super().__init__(kept.log_id, kept.slots, bounds, origin=origin, env=env)
        self._folder = folder
        self._start = kept.start
        self._cursor_at = cursor_at
        self._check_in_place = check_in_place
        self._env = env
        self._dirty = False
        self._opened = env.clock.monotonic()
        self._heartbeats: dict[str, float] = {}
        """Time of each slot's last heartbeat, on the monotonic clock; not before the log was opened."""
        self._formers: dict[str, tuple[int, int]] = {}
        """Of slots that were taken over: their epoch here, and the highest known epoch of a former primary."""
        self._refusal: Callable[[], Exception] | None = None
        """Returns the error of later changes, once closed."""

    def _unused_epoch(self) -> int:
        dropped = [state.epoch for state in self._slots.values() if state.dropped]
        return max(dropped) + 1 if len(dropped) >= MOST_DROPPED else 0

    def _new_mark(self) -> int:
        return self._env.chance.uuid().int >> 66 | 1

    def _retained(self) -> Bounds:
        """The offsets at which a slot may be: readers may not see the latest trim yet."""
        bounds = self._bounds()
        return Bounds(max(bounds.first, self._start), bounds.next)

    def trim_floor(self) -> int | None:
        """The offset up to which the log may be trimmed."""
        return trimming.trim_floor(self.proven())

    def consumed_floor(self) -> int | None:
        """The offset below which every consumer has passed; None without a consumer."""
        return trimming.consumed_floor(self.proven())

    def proven(self) -> list[SlotState]:
        """The slots without a tierer's position that belongs to another history: the log may have been restored."""
        with self._lock:
            attached = partial(exists, f"{self._folder}/{COLD_FILE}", disk=self._env.disk)
            copied = trimming.ColdTierProof(self._retained(), attached, lambda at: self._cursor_at(at).fingerprint)
            return trimming.proven(self._slots.values(), copied)

    def _idle_seconds(self, name: str) -> float:
        """Seconds since a slot's last heartbeat, or since the log was opened."""
        return self._clock.monotonic() - self._heartbeats.get(name, self._opened)

    def enforce(self, limits: SlotLimits, bytes_behind: Callable[[int], int]) -> list[SlotState]:
        """Durably drop expired slots and invalidate those that break a limit; logs each, returns the invalidated.

        ``bytes_behind`` returns the bytes stored from a position on. A slot that moves meanwhile is not changed.
        """
        for state in self._expire():
            _LOGGER.warning(
                "Slot %r of %s was dropped: its consumer has not claimed it, and was not seen for %g minutes.",
                state.name, self._folder, ((state.expires or 0) - state.last_seen) / SECOND / 60,
            )  # fmt: skip
        if limits == NO_LIMITS:
            return []
        first = trimming.retained_first(self.proven(), self._bounds().first)
        judged: list[tuple[SlotState, InvalidReason]] = []
        behind: dict[str, int] = {}
        for state in self.list():
            behind[state.name] = bytes_behind(state.position) if limits.lag_bytes and state.pins else 0
            is_idle = self._idle_seconds(state.name) > limits.idle_seconds
            reason = reason_to_invalidate(state, first=first, behind=behind[state.name], limits=limits, is_idle=is_idle)
            if reason is not None:
                judged.append((state, reason))
        invalidated = self._invalidate_judged(judged) if judged else []
        for state in invalidated:
            report_invalid(state, self._folder, behind[state.name], _LOGGER)
        return invalidated

    def _expire(self) -> list[SlotState]:
        """Durably drop expired slots without a heartbeat for their whole time; returns them."""
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
        """Durably invalidate a slot, with a reason."""
        with self._changing():
            before = self.get(name)
            return self._store(invalidate(before, before, reason, self._clock.now()))

    def _invalidate_judged(self, judged: Sequence[tuple[SlotState, InvalidReason]]) -> list[SlotState]:
        """Durably invalidate slots that are unchanged since they were judged, all at once; returns those."""
        with self._changing():
            now, slots = self._clock.now(), dict(self._slots)
            for state, reason in judged:
                slots[state.name] = invalidate(self._slots[state.name], state, reason, now)
            changed = [state for name, state in slots.items() if state != self._slots[name]]
            if changed:
                self._write(self._start, slots)
            return changed

    def retain(self, start: int, *, beyond_slots: bool) -> int:
        """Durably set the log's start, with all positions; returns the new start.

        Never above the slots' floor, unless ``beyond_slots``: then the slots that needed more are invalidated with the
        same write.
        """
        with self._changing():
            if beyond_slots:
                now = self._clock.now()
                behind = {state.name for state in trimming.outrun(self.proven(), start)}
                judged = {
                    state.name: invalidate(state, state, InvalidReason.WAL_REMOVED, now)
                    for state in self._slots.values()
                    if state.name in behind
                }
                slots = {**self._slots, **judged}
            else:
                slots = self._slots
                floor = trimming.trim_floor(self.proven())
                start = start if floor is None else min(start, floor)
            if start > self._start:
                self._write(start, slots)
            return self._start

    def begin_at(self, offset: int) -> int:
        """Durably move the log's start to an offset below which its cold tier has deleted everything, too.

        Never above a slot, except the tierer's; returns the log's start. The next trim deletes the records.
        """
        with self._changing():
            floor = trimming.floor(state for state in self._slots.values() if state.name != TIER_SLOT)
            start, bounds = min(offset, offset if floor is None else floor), self._retained()
            if bounds.first < start <= bounds.next:
                self._write(start, self._slots)
            return max(self._start, bounds.first)

    # --- failover ----------------------------------------------------------------------------------------------

    def consumers(self) -> list[SlotState]:
        """The slots of consumers of a node's log, dropped ones too: their epochs count when a name is used again.

        Also the tierer's slot: the hot tier need not retain records that it has copied, whatever consumers need.
        """
        with self._lock:
            found = [state for name, state in self._slots.items() if name.endswith(CONSUMER_SUFFIX)]
            tier = self._slots.get(TIER_SLOT)
            return found if tier is None or tier.dropped else [*found, tier]

    def copy_consumers(self, states: Iterable[SlotState]) -> None:
        """Store copies of the primary's slots of consumers, in place of earlier copies; they pin as those do.

        Durable when this returns, except for positions, which may be older after a crash. A slot whose position is not
        retained here keeps the position that its consumer had confirmed when the log was trimmed.
        """
        with self._changing():
            found = map(self._as_confirmed, states)
            copies = {(name := _name_of_copy(state.name)): replace(state, name=name) for state in found}
            others = {name: state for name, state in self._slots.items() if name != _name_of_copy(name)}
            known = {name: state for name, state in self._slots.items() if name not in others}
            if {name: _claim_of(state) for name, state in known.items()} != {
                name: _claim_of(state) for name, state in copies.items()
            }:
                self._write(self._start, {**others, **copies})
            elif known != copies:
                self._slots = {**others, **copies}
                self._dirty = True

    def _as_confirmed(self, state: SlotState) -> SlotState:
        """The slot where its consumer is known to be, if the log does not retain the position of a primary's slot.

        The primary may have begun with an outdated copy of the slot, and retain more than this node. Before this node
        trimmed, its own slot or its own copy had passed the trimmed records.
        """
        first = self._retained().first
        if state.position >= first:
            return state
        for name in (state.name, _name_of_copy(state.name)):
            known = self._slots.get(name)
            if known is not None and rules.is_outdated(state, known) and self._is_of_this_history(known):
                return replace(state, position=known.position, fingerprint=known.fingerprint)
        return state

    def _is_of_this_history(self, known: SlotState) -> bool:
        """Whether a slot is at the start of the log, which is never rewound, or after a record that is still there."""
        bounds, own = self._retained(), known.fingerprint
        if not bounds.first < known.position <= bounds.next:
            return known.position == bounds.first
        return own is not None and self._cursor_at(known.position).fingerprint == own

    def take_over(self, term: int, *, is_new: bool) -> None:
        """Durably make the copies of a former primary's slots those of this one, which leads in this term.

        ``is_new``: another node may have led since this one did, so that its own slots may be outdated, too. A slot
        whose position is not retained here is invalidated, since the former primary may have retained more.
        """
        with self._changing():
            end = self._bounds().next
            copies = {
                name.removesuffix(COPIED_SUFFIX): replace(state, name=name.removesuffix(COPIED_SUFFIX))
                for name, state in self._slots.items()
                if name.endswith(COPIED_SUFFIX)
            }
            slots = {name: state for name, state in self._slots.items() if not name.endswith(COPIED_SUFFIX)}
            changed = dict(copies)
            for name, state in slots.items():
                if name in copies:
                    changed[name] = replace(copies[name], epoch=max(state.epoch, copies[name].epoch))
                elif is_new and name.endswith(CONSUMER_SUFFIX):
                    changed[name] = state
            if not changed:
                return
            after = {name: rules.taken_over(state, term, end) for name, state in changed.items()}
            first, now = trimming.retained_first(self.proven(), self._retained().first), self._clock.now()
            lost = [name for name, state in after.items() if state.pins and state.position < first]
            after |= {name: invalidate(after[name], after[name], InvalidReason.WAL_REMOVED, now) for name in lost}
            self._write(self._start, {**slots, **after})
            for name in lost:
                why = f"since this node, which leads now, retains the log from {first} on"
                report_invalid(after[name], self._folder, why, _LOGGER)
            self._formers = {name: (after[name].epoch, state.epoch) for name, state in changed.items()}
            for name in after:
                self._mark_alive(name)

    def resume(self, name: str, holder: str, former: int) -> TableSlot:
        """Durably let a holder continue with its claim of a former primary, of epoch ``former``.

        ``Fenced`` if the slot was claimed or reset since this node leads, or if a later claim is known.
        """
        with self._changing():
            before = self.get(name)
            since, known = self._formers.get(name, (None, None))
            # After a restart of this node, only the epoch shows that no holder has claimed the slot since.
            is_untouched = since == before.epoch or (since is None and before.epoch % rules.EPOCHS_PER_TERM == 0)
            if not is_untouched:
                rules.check_held(before, holder=holder, epoch=former)
            after = rules.resumed(before, holder, self._clock.now(), former=former, known=known)
            self._store(after)
            self._formers[name] = (after.epoch, former)
            self._mark_alive(name)
            return TableSlot(self, name, holder, after.epoch)

    def check_open(self) -> None:
        """Raise the error of later changes, once closed."""
        if self._refusal is not None:
            raise self._refusal()

    def close(self, refusal: Callable[[], Exception]) -> None:
        """Write the noted positions, and refuse every later change, atomically."""
        with self._lock:
            self._refusal = refusal
            self._flush()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self.check_open()  # with the lock: closing does not come between
            yield

    def _mark_alive(self, name: str) -> None:
        self._heartbeats[name] = self._clock.monotonic()

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
        """Durably replace the file, and then publish its content."""
        self._check_in_place()
        self._dirty = True  # until the write succeeded: after an error either state may be stored
        slots = _without_oldest_dropped(slots)
        write_slots_file(self._folder, SlotsFile(self.log_id, start, tuple(slots.values())), disk=self._env.disk)
        self._start, self._slots, self._dirty = start, dict(slots), False


def _without_oldest_dropped(slots: dict[str, SlotState]) -> dict[str, SlotState]:
    """The slots with the latest dropped ones only; one of these gets the highest epoch of those that are forgotten.

    A dropped slot of a tierer stays: it records that the cold tier was given up. Copies stay: the primary decides.
    """
    dropped = [state for state in slots.values() if state.dropped and state.name != _name_of_copy(state.name)]
    if len(dropped) <= MOST_DROPPED:
        return slots
    dropped.sort(key=lambda state: state.last_seen)
    oldest, last = dropped[:-MOST_DROPPED], dropped[-1]
    last = replace(last, epoch=max(state.epoch for state in (*oldest, last)))
    forgotten = {state.name for state in oldest}
    return {**{name: state for name, state in slots.items() if name not in forgotten}, last.name: last}


def _name_of_copy(name: str) -> str:
    """The name of the copy of a slot; that of a copy stays as it is."""
    return name if name == TIER_SLOT or name.endswith(COPIED_SUFFIX) else name + COPIED_SUFFIX


def _claim_of(state: SlotState) -> SlotState:
    """The slot without the fields that may be older after a crash."""
    return replace(state, position=0, last_seen=0, suspected=None, fingerprint=None, expires=None)
