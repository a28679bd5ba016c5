"""Crashes of a follower at each step of its commits, for the tests of a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest

from strandline.errors import Fenced
from strandline.followers.events import Batching
from strandline.followers.run import follow
from strandline.log.contract import Log
from strandline.model.records import READ_SCHEMA
from strandline.model.sink import Sink
from strandline.testing.faulty import Crash


def follow_through_crashes(log: Log, open_sink: Callable[[], Sink], *, steps: Sequence[tuple[Any, str]] = ()) -> int:
    """Follow a log to its end with a follower that crashes at each step of each batch; returns the number of crashes.

    The follower of each batch crashes before ``apply``, before each of the ``steps`` (the class, and the name of the
    method that does it) and after ``apply``, once each. After a crash ``open_sink`` gives the sink of the next process,
    which knows only what was stored. It has to have all of a batch or nothing, and the crashed follower's sink, which
    then applies its batch once more, must change nothing. Compare the content with the log's when this returns.

    ``AssertionError`` if no batch reaches a step, or if a cursor is neither at the start nor at the end of a batch.
    """
    crashes, missed = 0, {name for _, name in steps}
    at = _position(log, open_sink())
    while (end := _end_of_batch(log, at)) is not None:
        sink = open_sink()
        points = [(type(sink), "apply"), *steps]
        while points and _position(log, open_sink()) == at:
            owner, name = points.pop(0)
            sink = open_sink()
            reached = _follow_and_crash(log, sink, end, owner, name)
            crashes, missed = crashes + reached, missed - ({name} if reached else set())
            _check(log, open_sink(), {at} if name == "apply" else {at, end}, f"after a crash before {name}")
        if _position(log, open_sink()) == at:
            sink = open_sink()
            crashes += _follow_and_crash(log, sink, end, type(sink), "apply", after=True)
        _check(log, open_sink(), {end}, "after apply has returned")
        _replay(log, sink, at, end)
        _check(log, open_sink(), {end}, "after a batch was applied once more")
        at = end
    assert not missed, f"No batch has reached {', '.join(sorted(missed))}."
    return crashes


@contextmanager
def interrupted(owner: Any, name: str, event: Callable[[], None], *, after: bool = False) -> Iterator[list[str]]:
    """Call ``event`` once, right before a step or right after it; yields the names of steps that were reached.

    It may raise :class:`~strandline.testing.faulty.Crash`, or do what another process does at that moment.
    """
    step, reached = getattr(owner, name), list[str]()
    with pytest.MonkeyPatch.context() as patch:

        def disturbed(*arguments: Any, **options: Any) -> Any:
            patch.undo()
            reached.append(name)
            if not after:
                event()
                return step(*arguments, **options)
            answer = step(*arguments, **options)
            event()
            return answer

        patch.setattr(owner, name, disturbed)
        yield reached


@contextmanager
def crashing_at(owner: Any, name: str, *, after: bool = False) -> Iterator[list[str]]:
    """Crash at a step: the block ends there, and the code after it stands for the next process."""

    def crash() -> None:
        raise Crash(f"at {name}")

    with interrupted(owner, name, crash, after=after) as reached, suppress(Crash):
        yield reached


def _follow_and_crash(log: Log, sink: Sink, end: int, owner: Any, name: str, *, after: bool = False) -> bool:
    with crashing_at(owner, name, after=after) as reached:
        follow(log, sink, batching=Batching(batches=1), upto=end)
    return bool(reached)


def _position(log: Log, sink: Sink) -> int:
    cursor = sink.cursor(log.log_id)
    return 0 if cursor is None else cursor.next


def _check(log: Log, sink: Sink, allowed: set[int], when: str) -> None:
    found = _position(log, sink)
    assert found in allowed, f"The cursor is {found} {when}, and should be {' or '.join(map(str, sorted(allowed)))}."


def _end_of_batch(log: Log, at: int) -> int | None:
    """The offset after the batch that begins at an offset; None at the log's end."""
    for batch in log.read(at, columns=["offset"]):
        return int(batch.column("offset")[-1].as_py()) + 1
    return None


def _replay(log: Log, sink: Sink, first: int, end: int) -> None:
    """Deliver a batch again, by a follower that does not know that it was applied."""
    records = pa.Table.from_batches(list(log.read(first, upto=end)), READ_SCHEMA)
    with suppress(Fenced):
        sink.apply(records, since=log.cursor_at(first), upto=log.cursor_at(end))
