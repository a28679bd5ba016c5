"""Commits of one follower: writes to the sink, then advances the slot to the sink's cursor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import AlreadyExists, CursorExpired, Diverged, Fenced, InvalidInput, NotFound, StrandlineError
from strandline.log.contract import READING, Log, Slot, require
from strandline.log.slots.rules import EPOCHS_PER_TERM
from strandline.model.cursor import Cursor, Limit, Span, Start
from strandline.model.records import READ_SCHEMA
from strandline.model.retention import NEWCOMER_SECONDS, SlotState
from strandline.model.sink import LogAwareSink, RestorableSink, Sink
from strandline.tables.apply import TableSink

_LOGGER: Final = logging.getLogger(__name__)
_TAKEOVERS: Final = 3


def begin(
    log: Log, sink: Sink, slot: str | None, *, start: Start, holder: str, repair: bool = False, is_known: bool = False
) -> SinkCommitter:
    """Start a follower, with Spark or without: returns the committer, which knows the start cursor.

    The start is the sink's own cursor, or for a new follower ``start``. The slot pins it before anything is read. A
    new follower's sink is created, and its slot claimed, with the first stored range; if there is nothing to store yet,
    at once, so that the start is stored. ``is_known``: it is no new one, and ``Diverged`` if it was removed.
    """
    require(log, "followed", *READING, slots=slot is not None)
    if missing := [f"{name}()" for name in ("cursor", "apply") if not hasattr(sink, name)]:
        raise InvalidInput(
            f"The sink {type(sink).__name__} cannot follow a log: it has no {' and no '.join(missing)}. Implement "
            "every method of the protocol Sink."
        )
    if isinstance(sink, LogAwareSink):
        sink.meet(log)
    cursor = _resumed(log, sink, repair=repair)
    is_new = cursor is None
    if is_new and is_known:
        raise _removed(sink)
    if cursor is None:
        offset = log.position_of(start)
        cursor = start if isinstance(start, Cursor) else log.cursor_at(offset)
    waiting = planned(log, cursor, is_all_wanted=is_new and start == "beginning")
    committer = SinkCommitter(log, sink, cursor, is_new=is_new)
    if slot is not None:
        committer.attach(slot, holder, is_rebuild=cursor.next == 0 or start == "retained")
    if not waiting:
        with committer.abandoned_on_error():
            committer.settle()
    return committer


def planned(log: Log, cursor: Cursor, *, is_all_wanted: bool) -> Sequence[Span]:
    """The next spans to store; refuses a cursor that this log cannot serve. ``is_all_wanted``: of a new follower."""
    try:
        return log.plan(cursor, Limit(batches=1))
    except CursorExpired as error:
        if not is_all_wanted:
            raise
        raise CursorExpired(
            f"The beginning of log {log.log_id} was trimmed, so that not all of it can be followed any more: bootstrap "
            "from a snapshot, or follow from 'retained'. A sink with one state per key then lacks the "
            f"keys that were not written since. ({error})"
        ) from error


def _resumed(log: Log, sink: Sink, *, repair: bool) -> Cursor | None:
    if isinstance(sink, RestorableSink):
        return sink.repair(log.log_id, lambda cursor: _serves(log, cursor)) if repair else sink.resume(log.log_id)
    if repair:
        raise InvalidInput(f"{sink!r} has no earlier versions to go back to: follow it without a repair.")
    return sink.cursor(log.log_id)


def _serves(log: Log, cursor: Cursor) -> bool:
    try:
        log.plan(cursor, Limit(batches=1))
    except (CursorExpired, Diverged):
        return False
    return True


class SinkCommitter:
    """A follower's sink and slot: only stored data advances the slot.

    A new follower claims its slot with the first successful apply, and :meth:`abandon` drops a slot that was created
    for it. So a slot with a holder proves that a sink existed.
    """

    def __init__(self, log: Log, sink: Sink, start: Cursor, *, is_new: bool) -> None:
        """Use :func:`begin`."""
        self.start = start
        self._log = log
        self._sink = sink
        self._has_stored = not is_new
        self._has_taken_over = False
        self._slot: Slot | None = None
        self._unclaimed: SlotState | None = None
        self._holder = ""
        self._undo: Callable[[], object] | None = None

    def attach(self, name: str, holder: str, *, is_rebuild: bool) -> None:
        """Pin the log from the start cursor on. A sink with stored data claims the slot now, a new one later.

        ``Diverged`` for a new follower that would start in the middle although the slot proves that a sink existed.
        """
        self._holder = holder
        known = self._state(name)
        if known is None:
            with contextlib.suppress(AlreadyExists):  # another follower was faster: it exists
                lifetime = None if self._has_stored else NEWCOMER_SECONDS
                created = self._log.slots.create(name, self.start.next, lifetime=lifetime)
                if not self._has_stored:
                    self._unclaimed, self._undo = created, lambda: self._log.slots.drop(name)
                    return
        elif not self._has_stored:
            if known.holder is not None:
                self._check_rebuild(known, is_rebuild=is_rebuild)
            elif known.pins:
                self._unclaimed = self._moved_back(known)
                return
        self._slot = self._taken(name)
        stored = self._sink.cursor(self._log.log_id)
        if stored is not None and stored.next < self.start.next:
            self.start = stored  # the sink was rebuilt before this follower held the slot, and lacks what follows
            self._slot = self._taken(name)
        self._slot.advance(self.start)  # an earlier run may have died between the sink and the slot

    @property
    def is_new(self) -> bool:
        """Whether nothing was stored yet."""
        return not self._has_stored

    @property
    def is_provisional(self) -> bool:
        """Whether the slot was created for this follower and expires unless touched, since nothing is stored yet."""
        unclaimed = self._unclaimed
        return unclaimed is not None and unclaimed.expires is not None

    def _state(self, name: str) -> SlotState | None:
        return next((state for state in self._log.slots.list() if state.name == name), None)

    def _check_rebuild(self, known: SlotState, *, is_rebuild: bool) -> None:
        if not is_rebuild:
            raise Diverged(
                f"Slot {known.name!r} was held by {known.holder!r} at offset {known.position}, but there is nothing at "
                f"{self._sink!r}: it was removed, or is elsewhere, and a start at offset {self.start.next} would skip "
                "its records. Put it back, or start at the beginning; to start there anyway, drop the slot "
                "first."
            )
        _LOGGER.warning(
            "Slot %r was held by %r at offset %d, but there is nothing at %r: it is built again from offset %d on.",
            *(known.name, known.holder, known.position, self._sink, self.start.next),
        )

    def _moved_back(self, known: SlotState) -> SlotState:
        if known.position <= self.start.next:
            return known
        self._undo = lambda: self._log.slots.reset(known.name, known.position)
        return self._log.slots.reset(known.name, self.start.next)

    def _taken(self, name: str) -> Slot:
        claimed = self._log.slots.claim(name, self._holder)
        before = claimed.state().position
        if before > self.start.next:
            # The sink was rebuilt, and needs records that its slot had passed: pin them before they are read.
            self._log.slots.reset(name, self.start.next)
            if not self._has_stored:
                self._undo = lambda: self._log.slots.reset(name, before)
            claimed = self._log.slots.claim(name, self._holder)
        return claimed

    def check_holder(self) -> None:
        """``Fenced`` if another follower has claimed the slot since."""
        state, mine = self._claim()
        if state is not None and state.epoch != mine:
            raise Fenced(
                f"Slot {state.name!r} is held by {state.holder!r} (epoch {state.epoch}) since; this follower had epoch "
                f"{mine} and stops. It changed nothing."
            )

    def _claim(self) -> tuple[SlotState | None, int]:
        """The slot's current state, and its epoch if no other follower has claimed it."""
        if self._slot is not None:
            return self._slot.state(), self._slot.epoch
        if self._unclaimed is None:
            return None, 0
        state = self._state(self._unclaimed.name)
        if state is not None and state.holder is None and state.epoch % EPOCHS_PER_TERM == 0:
            self._unclaimed = state  # unclaimed: as it was created, or with an epoch that a new primary raised
        return (self._unclaimed, -1) if state is None else (state, self._unclaimed.epoch)

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The sink's stored cursor; ``Diverged`` if the sink existed but was removed."""
        stored = self._sink.cursor(log_id)
        if stored is None and self._has_stored:
            raise _removed(self._sink)
        return stored

    @property
    def table(self) -> TableSink | None:
        """The sink, if its writing can be spread over workers."""
        return self._sink if isinstance(self._sink, TableSink) else None

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Store the range with its cursor; see :class:`~strandline.model.sink.Sink`."""
        self.store(lambda: self._sink.apply(records, since=since, upto=upto))

    def store(self, write: Callable[[], object]) -> None:
        """Let ``write`` store a range in the sink, with its cursor; a new follower claims its slot then."""
        if not self._has_stored:
            self.check_holder()
        self._store(write)
        if self._has_stored:
            return
        self._has_stored, self._undo = True, None
        if self._unclaimed is not None:
            self.check_holder()
            # If another new follower claims it in between, this claim fences that one: one of the two continues.
            self._slot = self._log.slots.claim(self._unclaimed.name, self._holder)
            self._unclaimed = None

    def _store(self, write: Callable[[], object]) -> None:
        for attempt in range(_TAKEOVERS):
            try:
                write()
            except Fenced:
                # The commit of an older follower came first. A slot shows which follower is newer; without one the sink
                # does, which refuses again if it was taken over since. Once this follower has taken the sink over, only
                # a newer one can fence it, which may have another slot: both would go on for ever.
                is_newer = self._has_stored if self._slot is None else self._slot.state().epoch == self._slot.epoch
                if not is_newer or self._has_taken_over or attempt + 1 == _TAKEOVERS:
                    raise
                if self._slot is not None and isinstance(self._sink, RestorableSink):
                    self._sink.resume(self._log.log_id)
            else:
                self._has_taken_over = True
                return

    def settle(self) -> None:
        """Store the start of a new follower that found nothing to store."""
        if not self._has_stored:
            self.apply(READ_SCHEMA.empty_table(), since=self.start, upto=self.start)
            self.advance(self.start)

    def advance(self, to: Cursor) -> None:
        """Advance the slot, if there is one, to the sink's stored cursor."""
        if self._slot is not None:
            self._slot.advance(to)

    def touch(self) -> None:
        """Send a heartbeat while the follower is idle or busy; safe in another thread."""
        slot, unclaimed = self._slot, self._unclaimed
        if slot is not None:
            slot.touch()
        elif unclaimed is not None:
            with contextlib.suppress(Fenced, NotFound):  # claimed by now, which counts as a heartbeat
                self._log.slots.touch(unclaimed.name, unclaimed.epoch)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Call :meth:`abandon` if the block raises."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Restore the slot if nothing was stored: an unneeded slot would pin the log."""
        undo, self._undo = self._undo, None
        if self._has_stored or undo is None:
            return
        try:
            state, mine = self._claim()
            if state is not None and state.epoch != mine:
                return  # another follower has claimed it
            if self._sink.cursor(self._log.log_id) is None:  # else the write landed, but its answer failed
                undo()
        except StrandlineError as error:
            _LOGGER.warning("The slot of a follower that stored nothing stays as it is: %s", error)


def _removed(sink: Sink) -> Diverged:
    return Diverged(
        f"{sink!r} was removed while it was followed: put it back, or start the follower again, which builds it from "
        "the log's beginning."
    )
