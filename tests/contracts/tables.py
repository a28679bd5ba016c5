"""Contract suite for tables that follow a log: other cuts, stale and crashed followers, concurrent committers."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import pytest

from strandline.errors import Fenced, StorageError
from strandline.model.cursor import Cursor
from strandline.model.sink import Sink
from strandline.testing.crashing import crashing_at, interrupted
from strandline.testing.sinks import DELETE, LOG, Change, SinkContract, changes, folded

ROWS: Final[Sequence[Change]] = tuple(
    (b"%d" % (n * 7 % 11), DELETE if not (n + 1) % 5 else b"value-%d" % n) for n in range(60)
)
"""The log that the tables of this suite follow."""


class TableContract(SinkContract):
    """What every table guarantees its followers, as tests; besides the contract of sinks.

    A subclass defines, besides the fixture ``sink`` and :meth:`content`, :meth:`again` and :attr:`steps`.
    """

    keeps_all: bool = False
    """Whether the table keeps every change (``mode="append"``)."""

    steps: Sequence[tuple[Any, str]] = ()
    """The steps of a commit: the class and the name of the method that does each of them.

    The first of them begins with an absent table."""

    locked: frozenset[str] = frozenset()
    """Steps during which other followers wait."""

    @abstractmethod
    def again(self, sink: Sink) -> Sink:
        """The sink of another process: it knows only what the table says."""

    @abstractmethod
    def offsets(self, sink: Sink) -> Sequence[int]:
        """The offsets of all rows of the table."""

    def deliver(self, sink: Sink, first: int, end: int) -> None:
        """Apply the log's records of these offsets."""
        upto = Cursor(LOG, end)
        sink.apply(changes(first, *ROWS[first:end]), since=upto.at(first), upto=upto)

    def check_exact(self, sink: Sink, end: int | None = None) -> int:
        """Check that the table holds exactly the log below its cursor, each change once; returns the cursor."""
        cursor = sink.cursor(LOG)
        at = 0 if cursor is None else cursor.next
        assert end is None or at == end
        if cursor is None:
            return 0
        assert self.content(sink) == folded(ROWS[:at])
        offsets = sorted(self.offsets(sink))
        assert offsets == (list(range(at)) if self.keeps_all else sorted(set(offsets)))
        return at

    @pytest.mark.parametrize("cuts", [(60,), (1, 2, 30, 60)], ids=len)
    def test_other_cuts_give_the_same_table(self, sink: Sink, cuts: Sequence[int]) -> None:
        for first, end in zip((0, *cuts[:-1]), cuts, strict=True):
            self.deliver(sink, first, end)
        self.check_exact(sink, 60)

    def test_ranges_that_overlap_and_come_twice_from_new_processes_are_applied_once(self, sink: Sink) -> None:
        for first, end in ((0, 10), (0, 10), (5, 20), (0, 15), (20, 30), (0, 60), (50, 60)):
            self.deliver(self.again(sink), first, end)
        self.check_exact(self.again(sink), 60)

    def test_the_cursor_can_be_asked_by_other_threads_while_ranges_are_applied(self, sink: Sink) -> None:
        seen: list[int] = []
        failed: list[BaseException] = []
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                try:
                    cursor = sink.cursor(LOG)
                except BaseException as error:  # noqa: BLE001 - it fails the test
                    failed.append(error)
                    return
                seen.append(0 if cursor is None else cursor.next)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for at in range(12):
                self.deliver(sink, at, at + 1)
        finally:
            done.set()
            asking.join()
        assert not failed, failed[0]
        assert seen == sorted(seen)
        self.check_exact(sink, 12)

    def test_a_replaced_follower_that_goes_on_does_no_harm(self, sink: Sink) -> None:
        self.deliver(sink, 0, 10)
        newer = self.again(sink)
        self.deliver(newer, 10, 20)
        self.deliver(newer, 20, 30)
        for end in (20, 40):
            with suppress(Fenced):
                self.deliver(sink, 10, end)
        self.check_exact(self.again(sink))

    def test_a_crash_at_any_step_leaves_all_of_a_range_or_nothing(self, sink: Sink) -> None:
        at = 0
        for number, (owner, name) in enumerate(self.steps):
            end = at + 2 + number % 3
            with crashing_at(owner, name) as reached:
                self.deliver(self.again(sink), at, end)
            assert reached, name
            assert self.check_exact(self.again(sink)) in {at, end}, name
            self.deliver(self.again(sink), at, end)
            at = self.check_exact(self.again(sink), end)

    def test_of_two_followers_at_any_step_each_record_is_applied_once(self, sink: Sink) -> None:
        at = 0
        for owner, name in self.steps:
            if name in self.locked:
                continue
            first = at

            def overtaken(first: int = first) -> None:
                self.deliver(self.again(sink), first, first + 2)

            with interrupted(owner, name, overtaken) as reached, suppress(Fenced):
                self.deliver(self.again(sink), first, first + 3)
            assert reached, name
            at = self.check_exact(self.again(sink))
            assert at in {first + 2, first + 3}, name

    def test_two_followers_that_race_apply_each_record_once(self, sink: Sink) -> None:
        failures: list[BaseException] = []

        def follow(step: int) -> None:
            try:
                while (at := _next_of(mine := self.again(sink))) < len(ROWS):
                    with suppress(Fenced, StorageError):  # the other was faster, and this one starts again
                        self.deliver(mine, at, min(at + step, len(ROWS)))
            except BaseException as error:  # noqa: BLE001 - the test shows it
                failures.append(error)

        threads = [threading.Thread(target=follow, args=(step,)) for step in (7, 11)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        self.check_exact(self.again(sink), len(ROWS))


def _next_of(sink: Sink) -> int:
    cursor = sink.cursor(LOG)
    return 0 if cursor is None else cursor.next
