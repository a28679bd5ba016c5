"""Crash exploration: stop a workload at each disk operation, crash in each mode, check the recovered state."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

from strandline.errors import DiskFull, StorageError
from strandline.testing.faulty import Crash
from strandline.testing.simdisk.disk import MOMENTS, Moment, SimulatedCall, SimulatedDisk
from strandline.testing.simdisk.nodes import POWER, Choices, CrashMode, Drawn, every

N = TypeVar("N")

Workload: TypeAlias = Callable[[SimulatedDisk, list[N]], None]
"""Opens the data on the disk, continues its work to its end, and notes what was acknowledged.

It need not close what it opened, but must end its threads. It begins on an empty disk.
"""
Check: TypeAlias = Callable[[SimulatedDisk, list[N]], None]
"""Opens the data on the disk and raises unless all notes hold; it may add notes of what it has read."""


@dataclass(frozen=True, slots=True)
class Explored:
    """Extent of an exploration; all checks passed."""

    states: int
    """Number of different states of disk and notes that were checked, continued, crashed and checked again."""
    stops: int
    """Number of times the workload was stopped or disturbed, or ended."""
    crashes: int
    """Number of crashes; those with the same disk and notes are one state."""
    fingerprint: str
    """Digest of all states in order: equal for two identical explorations."""

    def __str__(self) -> str:
        return f"{self.states} states explored, left by {self.crashes} crashes at {self.stops} stops"


def crash_everywhere(
    workload: Workload[N],
    check: Check[N],
    *,
    modes: Sequence[CrashMode] = tuple(CrashMode),
    seeds: Sequence[int] = (0, 1),
    limit: int = 8,
    again: int = 0,
    every: int = 1,
) -> Explored:
    """Stop the workload at every disk operation (before, half-way, after), and at its end, and crash in every mode.

    The state is checked; then the power fails at once, and it is checked again: what was shown must not be lost.
    Then the workload continues to its end, the disk crashes in the same mode, and it is checked a last time.

    Where a mode leaves a choice, all are tried if they are at most ``limit``, else one for each seed. With ``again``,
    the workload is stopped and crashed a second time at each of the first ``again`` operations after each crash, which
    is where repairs happen. An error of ``check`` or the workload has a note with its place. ``every`` takes a sample:
    one in ``every`` operations.
    """
    explorer = _Explorer(workload, check, modes, seeds, limit, every)
    explorer.stop_everywhere(SimulatedDisk(), [], "", again=again)
    return explorer.explored()


def fail_everywhere(
    workload: Workload[N],
    check: Check[N],
    *,
    modes: Sequence[CrashMode] = POWER,
    seeds: Sequence[int] = (0, 1),
    limit: int = 8,
    then: int = 0,
    every: int = 1,
) -> Explored:
    """Let every disk operation fail once, with a ``StorageError`` (before, half-way, after), and crash at the end.

    The workload may retry, or give up by raising the error. With ``then`` it is also stopped before each of the next
    ``then`` operations. A failed sync loses its writes, and the next one succeeds. Only machine crashes are tried by
    default: if a process dies while lost writes are still readable, the next one cannot know, and only a process that
    rewrites what it finds before it trusts it is safe. ``every`` takes a sample: one in ``every`` operations.
    """
    explorer = _Explorer(workload, check, modes, seeds, limit, every)
    explorer.fail_everywhere(then)
    return explorer.explored()


def fill_everywhere(
    workload: Workload[N],
    check: Check[N],
    *,
    step: int,
    modes: Sequence[CrashMode] = tuple(CrashMode),
    seeds: Sequence[int] = (0, 1),
    limit: int = 8,
) -> Explored:
    """Let the disk fill at every ``step`` bytes, and then crash; it has room again only after the first check.

    The workload may give up, and the first check too, by raising ``DiskFull``.
    """
    explorer = _Explorer(workload, check, modes, seeds, limit)
    explorer.fill_everywhere(step)
    return explorer.explored()


@dataclass(slots=True)
class _Explorer(Generic[N]):
    workload: Workload[N]
    check: Check[N]
    modes: Sequence[CrashMode]
    seeds: Sequence[int]
    limit: int
    every: int = 1
    stops: int = 0
    crashes: int = 0
    seen: dict[bytes, int] = field(default_factory=dict)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def explored(self) -> Explored:
        return Explored(len(self.seen), self.stops, self.crashes, self.digest.hexdigest())

    # --- faults ------------------------------------------------------------------------------------------------

    def stop_everywhere(self, start: SimulatedDisk, notes: list[N], where: str, *, again: int, reach: int = -1) -> None:
        number = 0
        while number != reach:
            moments: list[Moment] = ["before"]
            for moment in moments:
                disk, noted = start.fork(), copy.deepcopy(notes)
                disk.stop(number, moment=moment)
                with _blamed(f"{where}running towards call {number}"), contextlib.suppress(Crash):
                    self._run(disk, noted)
                if not disk.stopped:
                    self._crash(disk, noted, f"{where}at the end", again=again)
                    return
                if moment == "before":
                    moments += _later(disk.calls[number])
                self._crash(disk, noted, f"{where}{_describe(disk, number, moment)}", again=again)
            number += self.every if reach < 0 else 1

    def fail_everywhere(self, then: int) -> None:
        number = 0
        while True:
            moments: list[Moment] = ["before"]
            for moment in moments:
                disk = self._fail(number, moment, None)
                if disk is None:
                    return
                if moment == "before" and disk.calls[number].action not in ("sync", "sync_file"):
                    moments += _later(disk.calls[number])  # a sync has only one kind of failure
                for ahead in range(1, then + 1):
                    self._fail(number, moment, ahead)
            number += self.every

    def _fail(self, number: int, moment: Moment, ahead: int | None) -> SimulatedDisk | None:
        """Let a call fail, stop ``ahead`` calls later or at the end, and crash; None if there is no such call."""
        disk, notes = SimulatedDisk(), list[N]()
        if ahead is not None:
            disk.stop(number + ahead)
        disk.interrupt(number, StorageError(f"call {number} fails"), moment=moment)
        with _blamed(f"call {number} failed"), contextlib.suppress(StorageError, Crash):
            self._run(disk, notes)
        if len(disk.calls) <= number + (ahead or 0):
            return None
        later = "" if ahead is None else f", {_describe(disk, number + ahead, 'before')}"
        self._crash(disk, notes, f"{_describe(disk, number, moment)} failed{later}")
        return disk

    def fill_everywhere(self, step: int) -> None:
        capacity = 0
        while True:
            disk, notes = SimulatedDisk(capacity=capacity), list[N]()
            with _blamed(f"with room for {capacity} bytes"), contextlib.suppress(DiskFull):
                self.workload(disk, notes)
            self._crash(disk, notes, f"with room for {capacity} bytes")
            if not disk.refused:
                return
            capacity += step

    def _run(self, disk: SimulatedDisk, notes: list[N]) -> None:
        try:
            self.workload(disk, notes)
        except Exception:
            # The dead workload may raise its own error, and its other threads may, too.
            if not disk.stopped:
                raise

    # --- crashes -----------------------------------------------------------------------------------------------

    def _crash(self, disk: SimulatedDisk, notes: list[N], where: str, *, again: int = 0) -> None:
        """Try every crash from here, and follow each that leaves a new state."""
        self.stops += 1
        for mode in self.modes if disk.unsynced() else self.modes[:1]:
            for found in self._survivors(disk, mode, where):
                self.crashes += 1
                if not self._is_new(found, notes, again):
                    continue
                if again:
                    self.stop_everywhere(found, notes, f"{where}, {mode.value}; then ", again=0, reach=again)
                with _blamed(f"{where}, {mode.value}"):
                    self._follow(found, copy.deepcopy(notes), mode, where)

    def _survivors(self, disk: SimulatedDisk, mode: CrashMode, where: str) -> Iterator[SimulatedDisk]:
        def crashed(choices: Choices) -> SimulatedDisk:
            found = disk.fork()
            found.crash(mode, choices)
            return found

        if mode is not CrashMode.SCRAPS:
            found = list(islice(every(crashed), self.limit + 1))
            if len(found) <= self.limit:
                yield from found
                return
        for seed in self.seeds:
            yield crashed(Drawn(f"{seed} {mode.value} {where}"))

    def _follow(self, disk: SimulatedDisk, notes: list[N], mode: CrashMode, where: str) -> None:
        with contextlib.suppress(DiskFull) if disk.capacity is not None else contextlib.nullcontext():
            self.check(disk, notes)
        disk.crash(CrashMode.NOTHING)
        disk.capacity = None
        self.check(disk, notes)
        disk.kill()
        self.workload(disk, notes)
        disk.crash(CrashMode.NOTHING if mode is CrashMode.KILL else mode, Drawn(where))
        self.check(disk, notes)

    def _is_new(self, disk: SimulatedDisk, notes: list[N], again: int = 0) -> bool:
        """Whether this state, with these notes, was not followed as far before: the result would be the same."""
        key = hashlib.sha256(disk.fingerprint() + repr(notes).encode()).digest()
        if self.seen.get(key, -1) >= again:
            return False
        self.seen[key] = again
        self.digest.update(key)
        return True


def _later(call: SimulatedCall) -> tuple[Moment, ...]:
    """The moments of a call that leave another state than before it."""
    return MOMENTS.get(call.action, ("after",))


def _describe(disk: SimulatedDisk, number: int, moment: Moment) -> str:
    return f"{moment} call {number} ({disk.calls[number].action} {disk.calls[number].path})"


@contextlib.contextmanager
def _blamed(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"The disk: {where}.")
        raise
