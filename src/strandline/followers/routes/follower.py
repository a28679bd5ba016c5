"""Follows one log into the tables of a route: the foremost lane, tables that catch up alone, and the slot of all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event as StopEvent
from typing import Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import BadRecord, StrandlineError
from strandline.followers.committer import SinkCommitter, begin, planned
from strandline.followers.routes.jobs import RouteJobs
from strandline.followers.routes.lane import COMMITS, Found, Lane, Reading
from strandline.followers.routes.member import RoutedTable
from strandline.followers.routes.names import NamesKeeper
from strandline.followers.routes.pacing import together
from strandline.followers.routes.progress import RouteOptions, RouteProgress
from strandline.log.contract import Log, cursor_of
from strandline.log.read.reading import Arrival, wait_for_more
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Cursor, Start
from strandline.model.sink import Sink
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from strandline.tables.routes.route import MOST_TABLES, Route, Rule
from strandline.tables.routes.split import ByLabel
from strandline.tables.work import InProcess, Workers

_POLL: Final = 0.25
_LANES: Final = 2
"""Groups of tables that catch up side by side."""
_NEAR: Final = 50_000
"""Tables at most this many records behind others read with these."""
_NAMES_SECONDS: Final = 30.0
_READS: Final = Backoff(attempts=40, base=0.25, ceiling=30.0)
"""Failures to read the log in a row that a route survives."""
_LOGGER: Final = logging.getLogger(__name__)


class RouteFollower(Found):
    """Follows a log into the tables of a route, in the thread that calls :meth:`run`.

    The foremost lane reads for all tables that are in step. One that fails, is slow, or was never at the lane's
    position leaves it, catches up from its own cursor in a lane of its own, and comes back. The slot follows the
    slowest table.
    """

    def __init__(
        self,
        log: Log,
        route: Route,
        options: RouteOptions,
        env: Env,
        *,
        workers: Workers | None = None,
        jobs: RouteJobs | None = None,
        on_step: Callable[[str], object] = lambda _: None,
        on_progress: Callable[[Cursor], object] = lambda _: None,
    ) -> None:
        """Nothing is read or written yet."""
        self.log = log
        self._route = route
        self._options = options
        self._env = env
        self._on_progress = on_progress
        self._pools = contextlib.ExitStack()
        commits = self._pool(MOST_TABLES + 1, "strandline-commit")
        self._catching_up: Executor = self._pool(_LANES, "strandline-catch-up")
        self._reading = Reading(
            log, route.splits, workers or InProcess(), options.batching, env, commits, self._check_holder, on_step, jobs
        )
        self._members: dict[str, RoutedTable] = {}
        self._main: Lane | None = None
        self._lanes: dict[Future[None], Lane] = {}
        self._left: list[RoutedTable] = []
        self._keeper: NamesKeeper | None = None
        self._names_at: Cursor | None = None
        self._named = 0.0
        self._slot: SinkCommitter | None = None
        self._lowest: Cursor | None = None
        self._unrouted = 0
        self._stopping = False

    def _pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        return self._pools.enter_context(ThreadPoolExecutor(threads, thread_name_prefix=name))

    def run(self, stop: StopEvent | None) -> Cursor:
        """Follow until ``stop`` is set, or up to the end; returns the cursor of the slowest table.

        Raises the error of a table that did not reach the end, once all others have.
        """
        with self._pools:
            try:
                self.open()
                with self._alive():
                    self._run(stop)
            finally:
                self._stopping = True
        return self.cursor()

    def open(self) -> None:
        """Start a follower for each table, claim the slot, and divide the tables into lanes."""
        if self._main is not None:
            return
        start = cursor_of(self.log, self._options.start)
        for name in self._route.sinks:
            self._add(name, partial(self._route.sinks.__getitem__, name), self._options.start)
        rule = self._route.rule
        if rule is not None:
            place, store = rule.names_place()
            self._keeper = NamesKeeper(place, self._env, store)
            found = self._keeper.opened(start, rule.label.name)
            is_skipped = self._options.start == "retained" and found.cursor.next < start.next
            self._names_at = start if is_skipped else found.cursor
            self._take_names(rule, found.names)
        with ThreadPoolExecutor(COMMITS, thread_name_prefix="strandline-open") as pool:
            list(pool.map(self._try_open, self._members.values()))
        opened = [member for member in self._members.values() if member.cursor is not None]
        if not opened and self._members and rule is None:
            raise self._first_error()
        self._divide(opened, start)
        is_all_wanted = not self.has_stored and self._options.start == "beginning"
        planned(self.log, self.main.position, is_all_wanted=is_all_wanted)  # before the slot moves
        self._claim()

    def _add(self, name: str, sink: Callable[[], Sink], start: Start) -> RoutedTable:
        def begun() -> SinkCommitter:
            given = self._options
            return begin(
                self.log, sink(), None, start=start, holder=given.holder, repair=given.repair, is_known=member.is_known
            )

        labels = (str(getattr(self.log, "url", "")), name)
        member = self._members[name] = RoutedTable(name, begun, self._env, self._options.slot is not None, labels)
        return member

    def _take_names(self, rule: Rule, names: dict[str, int], since: Cursor | None = None) -> list[RoutedTable]:
        """Have a member for each name that the rule remembers; returns the new ones. ``since`` is known by its term."""
        fresh = []
        for name, offset in names.items():
            if name not in self._members and name not in rule.without:
                start = since if since is not None and since.next == offset else offset
                fresh.append(self._add(name, partial(rule.sink, name), start))
        if len(names) >= MOST_TABLES and getattr(self._route.splits.now, "known", None) is None:
            self._route.splits.now = ByLabel(rule.label, rule.without, frozenset(names))
        return fresh

    def _try_open(self, member: RoutedTable) -> None:
        try:
            member.open()
        except Exception as error:  # noqa: BLE001 - a table's error is told as its own, and stops no other
            member.failed(error)

    def _divide(self, opened: list[RoutedTable], start: Cursor) -> None:
        """The foremost group is the main lane; the others catch up with it."""
        cursors = {member.name: member.cursor for member in opened if member.cursor is not None}
        if self._names_at is not None:
            cursors[""] = self._names_at  # records above may have new names
        groups = together(((name, cursor.next) for name, cursor in cursors.items()), _NEAR) or [[]]
        foremost = next(group for group in reversed(groups) if "" in group or self._names_at is None)
        position = min((cursors[name] for name in foremost), key=lambda one: one.next, default=start)
        ahead = [name for group in groups[groups.index(foremost) :] for name in group]
        self._main = Lane(self._reading, self._following(ahead), position)
        self._left += [member for member in self._members.values() if member.name not in self._main.members]

    def _following(self, names: Iterable[str]) -> dict[str, RoutedTable]:
        found = {name: self._members[name] for name in names if name in self._members}
        for member in found.values():
            member.state, member.error, member.failures = "following", None, 0
        return found

    @property
    def main(self) -> Lane:
        """The foremost lane."""
        if self._main is None:
            raise AssertionError("open() was not called")
        return self._main

    def names(self, names: Iterable[str], since: Cursor) -> None:
        """Tables that have records from a cursor on: new ones of a rule are stored, and created.

        Also those that another follower has stored meanwhile.
        """
        rule, keeper = self._route.rule, self._keeper
        fresh = [name for name in names if name not in self._members]
        if rule is None or keeper is None or not fresh:
            return
        room = max(0, MOST_TABLES - len(keeper.known.names))
        if len(fresh) > room:
            _LOGGER.warning("The route has %d tables, and makes no more: further names are unrouted.", MOST_TABLES)
        for member in self._take_names(rule, keeper.add(fresh[:room], since).names, since):
            self._try_open(member)
            if member.cursor is not None and member.cursor.next >= since.next:
                member.state = "following"
                self.main.members[member.name] = member
            else:
                self._left.append(member)

    def rest(self, records: int, example: str) -> None:
        """Records that no table takes are counted, or end the route."""
        if self._route.unrouted == "refuse":
            are = "1 record is" if records == 1 else f"{records:,} records are"
            raise BadRecord(
                f"{are} for no table of the route (first: {example}), and nothing of this range was applied: give it a "
                "table, or let such records go to a table of their own or be skipped (unrouted)."
            )
        self._unrouted += records

    def _run(self, stop: StopEvent | None) -> None:
        failures = 0
        while stop is None or not stop.is_set():
            try:
                self._collect()
                progressed = self.main.step(self._options.upto, self)
                progressed = self.main.commit_due() or progressed
                self._leave_main()
                self._advance()
                if self._is_done():
                    break
                if not progressed:
                    self._wait()
            except StrandlineError as error:
                failures += 1
                if not error.retryable or failures >= _READS.attempts:
                    raise
                _LOGGER.warning("The log cannot be followed now, and is tried again: %s", error)
                self._env.clock.sleep(min(_POLL, _READS.pause(failures - 1, 1.0)))
                continue
            failures = 0
        self._finish()

    def _wait(self) -> None:
        if self._options.upto is not None and self.main.position.next >= self._options.upto:
            self._env.clock.sleep(0.01)  # others catch up
        else:
            arrival = wait_for_more(self.log, self.main.position, _POLL)
            if arrival is Arrival.END:
                self._options = replace(self._options, upto=self.main.position.next)

    def _is_done(self) -> bool:
        """Whether all tables are at the end, or will not reach it."""
        upto = self._options.upto
        if upto is None:
            return bool(self._members) and all(member.state == "stopped" for member in self._members.values())
        if self.main.position.next < upto or self._lanes or any(not member.is_given_up for member in self._left):
            return False
        return not self.main.commit_due(ends=True) or not self.main.left

    def _leave_main(self) -> None:
        self._left += self.main.left
        self.main.left.clear()

    def _collect(self) -> None:
        """Take back tables that caught up, and send those off that are due."""
        for future in [one for one in self._lanes if one.done()]:
            lane = self._lanes.pop(future)
            error = future.exception()
            try:
                if error is not None:
                    raise error
                self._rejoin(lane)
            except StrandlineError as reason:
                for member in lane.members.values():
                    member.failed(reason)
                self._left += lane.members.values()
            self._left += lane.left
        now = self._env.clock.monotonic()
        ready = [member for member in self._left if self._is_ready(member, now)]
        if ready and len(self._lanes) < _LANES:
            self._left = [member for member in self._left if member not in ready]
            self._send_off(ready)

    @staticmethod
    def _is_ready(member: RoutedTable, now: float) -> bool:
        if member.commit is not None:  # a slow commit, which its own thread ends
            if not member.commit.done():
                return False
            error, member.commit = member.commit.exception(), None
            if isinstance(error, Exception):
                member.failed(error)
            elif error is not None:
                raise error
        return member.state == "catching up" or (member.state == "failing" and now >= member.retry_at)

    def _send_off(self, ready: list[RoutedTable]) -> None:
        """Let tables catch up in lanes of their own; those near each other together."""
        for member in ready:
            if member.committer is None:
                self._try_open(member)
        self._left += [member for member in ready if member.cursor is None or member.committer is None]
        opened = {member.name: member for member in ready if member.committer is not None and member.cursor is not None}
        cursors = {name: member.cursor for name, member in opened.items() if member.cursor is not None}
        for group in together(((name, cursor.next) for name, cursor in cursors.items()), _NEAR):
            lane = Lane(self._reading, {name: opened[name] for name in group}, cursors[group[0]])
            for member in lane.members.values():
                member.state = "catching up"
            self._lanes[self._catching_up.submit(self._catch_up, lane)] = lane

    def _catch_up(self, lane: Lane) -> None:
        """Read up to the main lane, and commit all of it."""
        quiet = Found()
        while not self._stopping and lane.members and lane.position.next < (end := self.main.position.next):
            if not lane.step(end, quiet):
                break
        lane.commit_due(ends=True)

    def _rejoin(self, lane: Lane) -> None:
        """Take tables into the main lane; what that has read meanwhile is read for them first."""
        end = self.main.position.next
        if end - lane.position.next > _NEAR:
            self._left += lane.members.values()
            return
        while lane.members and lane.position.next < end and lane.step(end, Found()):
            pass
        lane.commit_due(ends=True)
        self.main.members.update(self._following(lane.members))

    def _finish(self) -> None:
        """Commit what was read, and wait for the tables that catch up."""
        self._stopping = True
        self.main.commit_due(ends=True)
        self._leave_main()
        for lane in [lane for future, lane in self._lanes.items() if future.exception() is None]:
            self._left += lane.left
        self._name_all(is_due=True)
        self._advance()
        if self._slot is not None and not self.has_stored:
            self._slot.abandon()  # leave nothing behind
        failed = [member for member in self._members.values() if member.error is not None]
        if failed and (self._options.upto is not None or len(failed) == len(self._members)):
            raise self._first_error()

    def _first_error(self) -> Exception:
        failed = [member for member in self._members.values() if member.error is not None]
        first = failed[0].error
        if first is None:
            raise AssertionError("no table has failed")
        for member in failed:
            at = "never opened" if member.cursor is None else f"at offset {member.cursor.next}"
            first.add_note(f"The table {member.name} of the route is {at}: {member.error}")
        return first

    # The slot, and the names: both follow the slowest table.

    def _claim(self) -> None:
        """Claim the slot, at the lowest cursor."""
        name, self._lowest = self._options.slot, self._lowest_cursor()
        if name is None:
            return
        start = self._lowest
        if start is None:  # a table could not be opened, and may need what the slot still pins, or all there is
            known = next((slot.position for slot in self.log.slots.list() if slot.name == name), None)
            first = self.log.position_of("retained") if known is None else known
            start = self.log.cursor_at(min(first, self.main.position.next))
        self._slot = SinkCommitter(self.log, _Cursors(self), start, is_new=not self.has_stored)
        self._slot.attach(name, self._options.holder, is_rebuild=start.next == 0 or self._options.start == "retained")

    @property
    def where(self) -> str:
        """The route, in messages: where a rule's names are, or the tables of a list."""
        return " and ".join(self._members) if self._keeper is None else self._keeper.where

    @property
    def has_stored(self) -> bool:
        """Whether the names of a rule, or any table of a list, were stored, by this follower or an earlier one."""
        if self._keeper is not None:
            return self._keeper.is_stored
        return any(one.committer is None or not one.committer.is_new for one in self._members.values())

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        slot = self._slot
        if slot is None:
            yield
            return
        with slot.abandoned_on_error(), SlotHeartbeat(slot, self.log, env=self._env):
            yield

    def _check_holder(self) -> None:
        if self._slot is not None:
            if self.has_stored:
                self._slot.store(lambda: None)  # claimed before the first commit, if the names are stored
            self._slot.check_holder()

    def _lowest_cursor(self) -> Cursor | None:
        """The cursor of the slowest table; None as long as one is unknown."""
        known = [member.cursor for member in self._members.values() if member.cursor is not None]
        if len(known) < len(self._members):
            return None
        return min(
            (*known, *([] if self._names_at is None else [self._names_at])), key=lambda one: one.next, default=None
        )

    def _name_all(self, *, is_due: bool = False) -> None:
        """Remember that all names below the position are known; now and then, since each time is a write."""
        now = self._env.clock.monotonic()
        if self._keeper is None or not (is_due or now - self._named >= _NAMES_SECONDS):
            return
        self._named = now
        self._names_at = self._keeper.advance(self.main.position)

    def _advance(self) -> None:
        self._name_all()
        slot, lowest = self._slot, self._lowest_cursor()
        if slot is not None and self.has_stored:
            slot.store(lambda: None)  # from the first commit on the slot is claimed, and kept
        if lowest is None or (self._lowest is not None and lowest.next <= self._lowest.next):
            return
        if slot is not None:
            slot.advance(lowest)
            self._reading.on_step("advanced")
        self._lowest = lowest
        self._on_progress(lowest)

    def cursor(self) -> Cursor:
        """The cursor of the slowest table that is known."""
        cursors = [member.cursor for member in list(self._members.values()) if member.cursor is not None]
        return min(cursors, key=lambda one: one.next, default=self.main.position)

    def progress(self) -> RouteProgress:
        """The progress as a value; safe in any thread."""
        tables = tuple(member.progress() for member in list(self._members.values()))
        return RouteProgress(tables, self._unrouted, 0 if self._main is None else self._main.position.next)


@dataclass(frozen=True, slots=True)
class _Cursors:
    """The tables of a route as one sink, for its slot."""

    route: RouteFollower

    def __repr__(self) -> str:
        return self.route.where

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The cursor of the slowest table; None if none has stored one."""
        del log_id
        return self.route.cursor() if self.route.has_stored else None

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Nothing: each table has commits of its own."""
