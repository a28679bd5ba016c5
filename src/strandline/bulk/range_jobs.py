"""A job that writes one object for each part of a range of a log, by a plan that is stored before them.

The plan fixes the parts, so that a job which was killed at any moment is continued by the next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any, TypeVar

import msgspec

from strandline.errors import AlreadyExists, CorruptData, Diverged, InvalidInput, NotFound
from strandline.log.contract import LogReading
from strandline.log.read.planning import divided
from strandline.log.read.span_tasks import is_same_history, run_located, spans_between
from strandline.model.cursor import Cursor
from strandline.storage.objects.store import ABSENT, ObjectStore
from strandline.storage.task_pool import TaskPool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RangeJob:
    """What the job reads, where it writes, and what runs its tasks."""

    log: LogReading
    store: ObjectStore
    pool: TaskPool
    on_progress: Callable[[int, int], None]
    """Gets the records of the parts that are written, and of all."""
    remedy: str
    """What to do if the job cannot write here."""

    def stored(self, path: str, kind: type[T]) -> T:
        """The plan or manifest at a path; ``NotFound``, or ``CorruptData`` if it is damaged."""
        data = self.store.get(path).data
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise self.damaged(path, error) from error

    def damaged(self, path: str, why: object) -> CorruptData:
        """The error for a damaged plan or manifest."""
        return CorruptData(f"{self.store.url}/{path} is damaged, or of another job: {why}; {self.remedy}.")

    def begun(self, path: str, kind: type[T], new: Callable[[], T], prefixes: Sequence[str]) -> T:
        """The stored plan; a new one if there is none. The job's objects have names with these prefixes."""
        if any(item.path == "log.json" for item in self.store.list("log.json")):
            raise InvalidInput(f"{self.store.url} holds a log, which must keep its folder for itself: {self.remedy}.")
        # Before the plan is read: the plan of any part is stored before it.
        found = next((item.path for prefix in prefixes for item in self.store.list(prefix)), None)
        try:
            return self.stored(path, kind)
        except NotFound:
            # Still there: another process that ends the job meanwhile removes its objects before the plan.
            if found is not None and any(item.path == found for item in self.store.list(found)):
                raise InvalidInput(
                    f"{self.store.url} has {found}, and no {path} that says of which job it is: {self.remedy}."
                ) from None
        with contextlib.suppress(AlreadyExists):  # another process was first, or the answer was lost
            self.store.put_if(path, msgspec.json.encode(new()), ABSENT)
        return self.stored(path, kind)

    def cut(self, first: int, upto: int | None, part_bytes: int) -> tuple[Cursor, tuple[int, ...]]:
        """The cursor at the end of a range, by default that of the log, and the first offsets of its parts."""
        end = self.log.bounds().next
        if upto is not None and upto > end:
            raise InvalidInput(f"upto is {upto:,}, and the log ends at {end:,}: end earlier, or try again later.")
        end = end if upto is None else upto
        if end < first:
            raise InvalidInput(
                f"The range begins at {first:,}, which is behind its end, {end:,}: begin earlier, or end later."
            )
        cursor = self.log.cursor_at(end)  # before the spans, so that a restore in between is detected
        spans = spans_between(self.log, first, end)
        wanted = max(1, -(-sum(span.size for span in spans) // max(1, part_bytes)))
        return cursor, tuple(group[0].first for group in divided(spans, wanted) if group)

    def check_history(self, cursor: str) -> None:
        """``Diverged`` if the log has other records before the cursor now."""
        if not is_same_history(self.log, Cursor.parse(cursor)):
            raise Diverged(
                f"{self.store.url} has records that {self.log!r} does not have now: the log was restored from a copy, "
                f"and has grown differently since; {self.remedy}."
            )

    def write(self, parts: Sequence[tuple[str, int, int]], task: Callable[..., Any], title: str) -> dict[str, int]:
        """Write the parts (name, first and next offset) that the store does not have, by tasks of them and their spans.

        Returns what the tasks return, and the sizes of the parts that were there.
        """
        prefix = commonprefix([name for name, _, _ in parts])  # noqa: RUF071 - a listing begins with any letters
        listed = self.store.list(prefix) if parts else ()
        found = {item.path: item.size for item in listed if item.size}  # an empty one is no part
        missing = [task(*part, spans_between(self.log, *part[1:])) for part in parts if part[0] not in found]
        total = sum(end - first for _, first, end in parts)
        done = total - sum(part.next - part.first for part in missing)
        self.on_progress(done, total)
        for part, result in run_located(self.log, missing, self.pool, title):
            found[part.name] = result
            done += part.next - part.first
            self.on_progress(done, total)
        return found


def parts_of(first: int, cuts: Sequence[int], upto: int, name: str) -> list[tuple[str, int, int]]:
    """The parts of a range that begin at these cuts; ``ValueError`` unless they are the whole range, in order.

    >>> parts_of(3, [3, 5], 9, "part-{:02d}-{:02d}.txt")
    [('part-03-05.txt', 3, 5), ('part-05-09.txt', 5, 9)]
    """
    ends = [*cuts, upto]
    if ends[0] != first or any(one >= other for one, other in pairwise(ends)):
        raise ValueError("its parts are not its range")
    return [(name.format(one, other), one, other) for one, other in pairwise(ends)]
