"""A lease: at most one holder at any time, by compare-and-set and elapsed time.

No clock is compared with another machine's. The holder's term starts *before* its request; a challenger waits a full
term *after* it first saw the current content of the lease, and takes the lease only if it is unchanged. Both use a
clock that also runs while the machine is suspended. So the holder's term is over before another one's starts, whatever
was slow, lost or suspended. Clocks must run at about the same rate: the holder stops :data:`MARGIN` of a term early.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from uuid import UUID

from strandline.errors import AlreadyExists, CorruptData, Fenced, NotFound, StorageError
from strandline.model.arguments import Natural
from strandline.model.arguments import seconds as times
from strandline.model.json_values import parse_object, read_record, stamp_fields
from strandline.model.stamp import OpId, Stamped
from strandline.storage.cell import StoreCell
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import Backoff
from strandline.storage.worker_thread import WorkerThread

MARGIN: Final = 1 / 64
"""The part of a term by which the holder stops early: its clock may run slower than a challenger's."""

_TERM: Final = times(most=7 * 86400, above=0)
_READS: Final = 8
"""Reads per term of a waiting challenger."""


# --- the rules: pure -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The stored lease: its holder, the term from each heartbeat, and the holder's epoch."""

    holder: str | None
    token: UUID
    """Identifies the :class:`Lease` object that holds the lease: a restarted process is another holder."""
    epoch: Natural
    """Grows with each new holder only."""
    beat: Natural
    """Grows with each write: no two contents are equal."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Sighting:
    """The content that a challenger saw, and when it first saw it, by its own clock."""

    state: LeaseState
    since: float

    def again(self, state: LeaseState, now: float) -> Sighting:
        """After another read, finished at ``now``: the time continues only if the content is unchanged."""
        return self if state == self.state else Sighting(state, now)

    def has_expired(self, now: float) -> bool:
        """Whether the lease was unchanged for a full term of its holder."""
        return now - self.since >= self.state.seconds


def taken(state: LeaseState, mine: LeaseState, expired: LeaseState | None) -> LeaseState:
    """The lease, acquired if it is mine, free, or equal to ``expired``; otherwise unchanged.

    A new holder's epoch is above the former one's, and above ``mine.epoch``.
    """
    if state.token == mine.token and state.holder is not None:
        return replace(state, holder=mine.holder, beat=state.beat + 1, seconds=mine.seconds)
    if state.holder is None or state == expired:
        return replace(mine, epoch=max(state.epoch, mine.epoch) + 1, beat=state.beat + 1)
    return state


def renewed(state: LeaseState, mine: LeaseState, epoch: int) -> LeaseState:
    """The lease with a new heartbeat; ``Fenced`` if it is no longer mine."""
    if state.token != mine.token or state.holder is None or state.epoch != epoch:
        raise Fenced(
            f"The lease of {mine.holder!r} (epoch {epoch}) was taken by {state.holder!r} (epoch {state.epoch}); stop "
            "the work that it protected."
        )
    return replace(state, holder=mine.holder, beat=state.beat + 1, seconds=mine.seconds)


def released(state: LeaseState, mine: LeaseState) -> LeaseState:
    """The lease, released if it is mine; otherwise unchanged."""
    if state.token != mine.token or state.holder is None:
        return state
    return replace(state, holder=None, beat=state.beat + 1)


class LeaseCodec:
    """A lease as a cell's content, in JSON."""

    def encode(self, state: Stamped[LeaseState]) -> bytes:
        """The bytes of a state."""
        lease = {**asdict(state.value), "token": state.value.token.hex}
        fields = {"kind": "strandline-lease", "version": 1, **lease, **stamp_fields(state)}
        return json.dumps(fields, indent=1).encode() + b"\n"

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[LeaseState]:
        """The state in these bytes; damage is an error, never a free lease."""
        try:
            fields = _known(parse_object(data))
            lease = read_record(LeaseState, fields, seconds=_TERM.check(float(fields["seconds"]), "Its term"))
            return read_record(Stamped, fields, value=lease)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise CorruptData(
                f"The lease {where} is damaged: {error!r}. When no process uses it any more, delete the object."
            ) from error


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    if (fields["kind"], fields["version"]) != ("strandline-lease", 1):
        raise ValueError(f"{fields['kind']!r} of version {fields['version']!r} is not known")
    return fields


# --- the shell -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HeldTerm:
    epoch: int
    deadline: float


@bound_to_process(close=("release",), keep=("seconds",))
class Lease:
    """A lease in one object of a store. At most one holder at any time, on any machine.

    The holder renews well before ``seconds`` are over, calls :meth:`ensure` after its work is durable and before it
    acknowledges, and stops when that raises. Thread-safe.

    >>> from strandline.testing.plain import PlainStore
    >>> store = PlainStore()
    >>> one, two = Lease(store, "lease", "one"), Lease(store, "lease", "two")
    >>> one.try_acquire(), two.try_acquire()
    (True, False)
    >>> one.release()
    >>> two.try_acquire(), two.epoch
    (True, 2)
    """

    def __init__(
        self,
        store: ObjectStore,
        path: str,
        holder: str,
        *,
        seconds: float = 15.0,
        env: Env = SYSTEM,
    ) -> None:
        """Use the object ``path``; nothing is read or written yet. ``holder`` names this holder to others."""
        self._env = env
        self._mine = LeaseState(holder, env.chance.uuid(), 0, 0, _TERM.check(seconds, "The term of a lease"))
        backoff = Backoff(attempts=8, base=0.01, ceiling=seconds / 16)
        self._cell = StoreCell(store, path, LeaseCodec(), backoff=backoff, env=env)
        self._lock = threading.RLock()
        self._seen: Sighting | None = None
        self._held_term: _HeldTerm | None = None
        self._origin = Origin(f"The lease {self._cell.where}", self)

    def __repr__(self) -> str:
        return f"Lease({self._cell.where!r}, {self._mine.holder!r})"

    @property
    def epoch(self) -> int | None:
        """The epoch of this holder; None if the lease was never held, or was lost."""
        term = self._held_term
        return None if term is None else term.epoch

    @property
    def seconds(self) -> float:
        """The term."""
        return self._mine.seconds

    def held(self) -> bool:
        """Whether the lease is held now; no I/O."""
        term = self._held_term
        return term is not None and self._env.clock.boot() < term.deadline

    def age(self) -> float | None:
        """Seconds since the last renewal was requested; None if the lease is not held. No I/O."""
        term = self._held_term
        return None if term is None else self._env.clock.boot() - term.deadline + self.seconds * (1 - MARGIN)

    def ensure(self) -> int:
        """The epoch, if the lease is held now, or ``Fenced``; no I/O.

        Call it before each step that only the holder may do, and again after the step is durable and before it is
        acknowledged.
        """
        term = self._held_term
        if term is None:
            raise Fenced(f"{self!r} is not held: it was never acquired, was released, or was lost. Acquire it first.")
        if self._env.clock.boot() >= term.deadline:
            raise Fenced(
                f"{self!r} was not renewed within {self.seconds:g} s, so another process may hold it; nothing may be "
                "done or acknowledged under it. Acquire it again."
            )
        return term.epoch

    def read(self) -> LeaseState | None:
        """The stored lease, of any holder; None without one. Counts as a read of a waiting challenger."""
        with self._lock:
            try:
                state = self._cell.read().value
            except NotFound:
                return None
            self._observe(state)
            return state

    def try_acquire(self, *, above: int = 0) -> bool:
        """Acquire the lease if it is free or has expired, renew it if it is held; does not wait.

        A lease has expired when this object saw it unchanged for a full term: call it repeatedly, as :meth:`acquire`
        does. The new epoch is also higher than ``above``, for callers that have seen higher epochs of a lease that was
        lost and created again. ``OutcomeUnknown`` or ``TransientStorageError`` if the store failed: then the lease is
        not held, or as long as before.
        """
        with self._lock:
            asked = self._env.clock.boot()
            try:
                state = self._cell.read().value
            except NotFound:
                return self._create(asked, above)
            expired = self._observe(state)
            if state.holder is not None and state.token != self._mine.token and expired is None:
                self._held_term = None
                return False
            asked = self._env.clock.boot()
            state = self._cell.update(self._op(), lambda now: taken(now, replace(self._mine, epoch=above), expired))
            return self._granted(state, asked)

    def _create(self, asked: float, above: int) -> bool:
        mine = replace(self._mine, epoch=above + 1, beat=1)
        try:
            return self._granted(self._cell.create(self._op(), mine), asked)
        except AlreadyExists:
            return False

    def _observe(self, state: LeaseState) -> LeaseState | None:
        """Record a read; returns the content if the lease has expired."""
        # The time is taken after the read: a renewal may have happened during it, and its holder counts from before.
        now = self._env.clock.boot()
        self._seen = Sighting(state, now) if self._seen is None else self._seen.again(state, now)
        return state if self._seen.has_expired(now) else None

    def _granted(self, state: LeaseState, asked: float) -> bool:
        if state.token != self._mine.token or state.holder is None:
            self._held_term = None
            return False
        # From before the request: the answer may have taken longer than the term.
        self._held_term = _HeldTerm(state.epoch, asked + self.seconds * (1 - MARGIN))
        return self.held()

    def acquire(self, timeout: float | None = None) -> bool:
        """Try until the lease is held (True), or until the timeout (False); up to a term after its holder died."""
        deadline = None if timeout is None else self._env.clock.monotonic() + timeout
        while not self.try_acquire():
            pause = self.seconds / _READS * (0.5 + self._env.chance.jitter())
            if deadline is not None:
                left = deadline - self._env.clock.monotonic()
                if left <= 0:
                    return False
                pause = min(pause, left)
            self._env.clock.sleep(pause)
        return True

    def renew(self) -> None:
        """Hold the lease for another term from now; ``Fenced`` if another holder has it.

        If the store fails, it is held as long as before.
        """
        with self._lock:
            term = self._held_term
            if term is None:
                self.ensure()
                return
            asked = self._env.clock.boot()
            try:
                state = self._cell.update(self._op(), lambda now: renewed(now, self._mine, term.epoch))
            except (Fenced, NotFound) as error:
                self._held_term = None
                raise Fenced(f"{self._cell.where} was lost: {error}") from error
            self._granted(state, asked)
            self.ensure()  # the answer may have taken longer than the term

    def release(self) -> None:
        """Release the lease, so that others can acquire it at once. Idempotent.

        Storage errors are ignored: others then wait for a term.
        """
        with self._lock:
            held, self._held_term = self._held_term is not None, None
            if held:
                with contextlib.suppress(StorageError):
                    self._cell.update(self._op(), lambda now: released(now, self._mine))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renew a held lease in a thread, three times per term, until the block ends.

        The block calls :meth:`ensure`: a lost lease is no longer renewed, and nothing else reports that.
        """
        over = threading.Event()
        renewer = WorkerThread(self._renew_until, over, name="strandline-lease")
        renewer.start()
        try:
            yield
        finally:
            over.set()
            renewer.join()

    def _renew_until(self, over: threading.Event) -> None:
        while not self._env.clock.wait(over, self.seconds / 3):
            try:
                self.renew()
            except Fenced:
                return
            except StorageError:
                continue  # retried; the lease expires if that fails, too

    def _op(self) -> OpId:
        return OpId(self._env.chance.uuid())
