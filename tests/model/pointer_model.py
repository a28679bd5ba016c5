"""A model of exporters that race the pointer to the newest snapshot, and trim: over its production edits.

Clocks decide nothing here: every payload counts as old, so that a trim deletes whatever the pointer lets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

from strandline.model.cursor import Cursor
from strandline.model.snapshot import Artifact, Pointer
from strandline.snapshots import pointer as production
from strandline.snapshots.pointer import SnapshotSweep, StalePayload
from tests.model.explorer import Model, Move

PARTS = 2
NOW = 1


@dataclass(frozen=True, slots=True)
class Job:
    """A snapshot to publish, perhaps with a trim after it. Identical consumers publish equal ones under equal names."""

    offset: int
    log: int = 1
    content: str = "a"
    replacing: bool = False
    trims: bool = True

    @property
    def cursor(self) -> Cursor:
        return Cursor(UUID(int=self.log), self.offset)


@dataclass(frozen=True, slots=True)
class Process:
    """An exporter that trims afterwards, as all do, or one that only trims (``job`` is None): what it does next."""

    name: str
    job: Job | None
    step: str = "begin"
    seen: Pointer | None = None
    artifact: Artifact | None = None
    uploaded: int = 0
    listed: tuple[str, ...] = ()
    sweep: SnapshotSweep | None = None
    doomed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """The pointer, the payload objects that exist, and the processes. ``crashes`` is how many may still crash."""

    pointer: Pointer
    objects: frozenset[tuple[str, int]]
    processes: tuple[Process, ...]
    crashes: int
    broken: str | None = None

    def lacks(self, location: str) -> bool:
        return any((location, part) not in self.objects for part in range(PARTS))


@dataclass(frozen=True, slots=True)
class PointerModel:
    """The moves and the promises. ``rules`` are the production ones, or those of a broken twin.

    ``blindly`` writes the pointer without looking whether it has changed since it was read.
    """

    jobs: tuple[Job | None, ...]
    crashes: int = 0
    rules: ModuleType | SimpleNamespace = production
    blindly: bool = False

    def model(self) -> Model[Place]:
        processes = tuple(Process("ABC"[number], job) for number, job in enumerate(self.jobs))
        initial = Place(Pointer(), frozenset(), processes, self.crashes)
        return Model(initial, self.moves, lambda place: place, self.invariant, self.final)

    # --- moves -------------------------------------------------------------------------------------------------

    def moves(self, place: Place) -> Iterator[Move[Place]]:
        for number, process in enumerate(place.processes):
            if process.step == "done":
                continue
            label, after, moved = getattr(self, f"_{process.step}")(place, process)
            yield Move(f"{process.name} {label}", _with(moved, number, after), fair=True)
            if place.crashes and process.step != "begin":
                died = replace(place, crashes=place.crashes - 1)
                again = Process(process.name, process.job)
                yield Move(f"{process.name} dies and begins again", _with(died, number, again))

    def _begin(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        job, pointer = process.job, place.pointer
        if job is None:
            return "looks at the pointer", replace(process, step="list", seen=pointer), place
        current = pointer.current
        other = job.replacing and current is not None and current.cursor.log_id != job.cursor.log_id
        if current is not None and not other and not self.rules.follows(job.cursor, current):
            return "sees something as new", replace(process, step="done"), place
        location = self.rules.location_of(pointer.generation, job.cursor, job.content)
        artifact = Artifact(location, job.cursor, "fold", 1, 1, 1, job.content, published=0)
        after = Process(process.name, job, "upload", seen=pointer, artifact=artifact)
        return f"begins generation {pointer.generation}", after, place

    def _upload(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        assert process.artifact is not None
        part = process.uploaded
        after = replace(process, uploaded=part + 1, step="upload" if part + 1 < PARTS else "point")
        moved = replace(place, objects=place.objects | {(process.artifact.location, part)})
        return f"uploads part {part}", after, moved

    def _point(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        assert process.artifact is not None
        assert process.job is not None
        pointer = process.seen if self.blindly else place.pointer
        try:
            pointer = self.rules.point(pointer, process.artifact, replacing=process.job.replacing)
        except StalePayload:
            return "is refused", Process(process.name, process.job), place
        after = Process(process.name, process.job, "trim" if process.job.trims else "done")
        return f"points at {process.job.offset}", after, self._moved(place, pointer)

    def _moved(self, place: Place, pointer: Pointer) -> Place:
        before, after = place.pointer.current, pointer.current
        broken = None
        if before is not None and (after is None or _behind(after.cursor, before.cursor)):
            broken = "The pointer went back."
        if pointer.min_generation < place.pointer.min_generation:
            broken = "The pointer forgot what it had given up."
        return replace(place, pointer=pointer, broken=place.broken or broken)

    def _trim(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        return "looks at the pointer, to trim", replace(process, step="list", seen=place.pointer), place

    def _list(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        return "lists the payloads", replace(process, step="give_up", listed=_payloads(place)), place

    def _give_up(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        assert process.seen is not None
        generation = self.rules.abandoned(process.seen, dict.fromkeys(process.listed, 0), before=NOW)
        moved, told = place, "gives nothing up"
        if generation is not None:
            moved, told = self._moved(place, self.rules.give_up(place.pointer, generation)), f"gives up {generation}"
        pointer = process.seen if generation is None else moved.pointer
        sweep = self.rules.plan_sweep(pointer, process.listed, before=NOW)
        doomed = tuple(
            (location, part)
            for location in (*sweep.superseded, *sweep.unlisted)
            for part in reversed(range(PARTS))
            if location in process.listed
        )
        step = "delete" if doomed else "forget" if sweep.superseded else "done"
        return told, Process(process.name, process.job, step, sweep=sweep, doomed=doomed), moved

    def _delete(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        first, *rest = process.doomed
        moved = replace(place, objects=place.objects - {first})
        after = replace(process, doomed=tuple(rest), step="delete" if rest else "forget")
        return f"deletes part {first[1]} of {first[0]}", after, moved

    def _forget(self, place: Place, process: Process) -> tuple[str, Process, Place]:
        assert process.sweep is not None
        pointer = self.rules.forget(place.pointer, process.sweep.superseded)
        return "forgets what it deleted", Process(process.name, None, "done"), self._moved(place, pointer)

    # --- promises ----------------------------------------------------------------------------------------------

    def invariant(self, place: Place) -> str | None:
        current = place.pointer.current
        if place.broken is not None:
            return place.broken
        if current is not None and place.lacks(current.location):
            return f"The pointer names {current.location}, which is not whole."
        return None

    def final(self, place: Place) -> str | None:
        """All are done: the newest is published, and one more trim leaves that and nothing else."""
        current = place.pointer.current
        newest = max((job.offset for job in self.jobs if job is not None and not job.replacing), default=None)
        if newest is not None and (current is None or current.cursor.next < newest):
            return f"All are done, and {newest} is not published."
        listed = _payloads(place)
        generation = self.rules.abandoned(place.pointer, dict.fromkeys(listed, 0), before=NOW)
        pointer = place.pointer if generation is None else self.rules.give_up(place.pointer, generation)
        sweep = self.rules.plan_sweep(pointer, listed, before=NOW)
        left = set(listed) - {*sweep.superseded, *sweep.unlisted} - {current and current.location}
        return f"All are done, and {sorted(left)} would stay for ever." if left else None


def _payloads(place: Place) -> tuple[str, ...]:
    return tuple(sorted({location for location, _ in place.objects}))


def _with(place: Place, number: int, process: Process) -> Place:
    processes = place.processes
    return replace(place, processes=(*processes[:number], process, *processes[number + 1 :]))


def _behind(after: Cursor, before: Cursor) -> bool:
    return after.log_id == before.log_id and after.next < before.next


def twin(**replaced: Any) -> SimpleNamespace:
    """The production rules with some replaced."""
    names = ("follows", "location_of", "generation_of", "point", "give_up", "abandoned", "plan_sweep", "forget")
    return SimpleNamespace(**{name: getattr(production, name) for name in names} | replaced)
