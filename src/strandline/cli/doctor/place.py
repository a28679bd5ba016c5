"""Checks of an address for logs: permissions, guarantees and clock of the store, and the log in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Barrier
from typing import Final

from strandline.cli.doctor.lines import CheckStatus, Line, ok, problem, warning
from strandline.cli.shared import output as show
from strandline.cli.shared.targets import contents_at, folder_at, is_free
from strandline.errors import (
    AlreadyExists,
    Conflict,
    NotALog,
    NotFound,
    StorageError,
    StrandlineError,
    TransientStorageError,
    WrongKind,
)
from strandline.log.folders import FolderKind, refuse_others
from strandline.log.object import open_log
from strandline.model.head import Head
from strandline.model.retention import FOREVER, SlotState
from strandline.model.times import TOLERANCE
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ABSENT, Match, ObjectStore, Precondition, Version, measure_skew

RACERS: Final = 8
_ROUNDS: Final = 5
_SECOND: Final = 1_000_000
_SKEW: Final = 5.0
"""Seconds by which clocks may differ without a warning."""
_LITTLE: Final = 1 << 30
_NOTHING: Final = 64 << 20
_LONG_AGO: Final = 86_400
_UNSAFE: Final = "two writers could both believe that they were first: keep no log here."


class StoreChecks:
    """Checks a store. Writes only below a folder of its own, ``doctor-…``, and removes that afterwards."""

    def __init__(self, store: ObjectStore, *, env: Env = SYSTEM) -> None:
        """Check ``store``; nothing is done yet."""
        self._store = store
        self._clock = env.clock
        self.folder = f"doctor-{env.chance.uuid().hex}"

    def lines(self) -> Iterator[Line]:
        """All checks of the store, one by one."""
        looks: list[tuple[str, Callable[[], Line]]] = [
            ("write", self._write),
            ("read", self._read),
            ("list", self._list),
            ("create once", self._create_once),
            ("replace if unchanged", self._replace),
            ("race to create", lambda: self._race("race to create", ABSENT)),
            ("race to replace", lambda: self._race("race to replace", None)),
            ("clock", self._clocks),
            ("delete", self._delete),
        ]
        try:
            for what, look in looks:
                line = self._tried(what, look)
                yield line
                if what == "write" and line.status is CheckStatus.PROBLEM:
                    return  # further checks would fail, too
        finally:
            left = self._clean()
        if left is not None:
            yield left

    def _tried(self, what: str, look: Callable[[], Line]) -> Line:
        try:
            return look()
        except TransientStorageError as error:
            return warning(what, f"It could not be checked: {error}")
        except StrandlineError as error:
            return problem(what, str(error))

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _took(self, action: Callable[[], object]) -> str:
        began = self._clock.monotonic()
        action()
        return f"{(self._clock.monotonic() - began) * 1000:.0f} ms"

    # --- plain calls -------------------------------------------------------------------------------------------

    def _write(self) -> Line:
        try:
            return ok("write", self._took(lambda: self._store.put(self._path("object"), [b"one ", b"two"])))
        except NotFound:  # a file system that makes no folders, as /proc; a bucket that is not there
            return problem("write", f"Nothing can be made at {self._store.url}: check the address, or name another.")

    def _read(self) -> Line:
        path = self._path("object")
        found: list[bytes] = []
        took = self._took(lambda: found.append(bytes(self._store.get(path).data)))
        if found != [b"one two"] or bytes(self._store.get_range(path, 4, 3)) != b"two":
            return problem("read", f"{self._store.url}/{path} does not hold what was written: keep no log here.")
        return ok("read", took)

    def _list(self) -> Line:
        for name in ("b", "c", "a"):
            self._store.put(self._path(f"listed/{name}"), b"x")
        names = [item.path.rpartition("/")[2] for item in self._store.list(self._path("listed/"))]
        if names != ["a", "b", "c"]:
            message = f"A listing gives {names} where a, b and c were written: what was just written must be listed."
            return problem("list", message)
        later = [item.path for item in self._store.list(self._path("listed/"), start_after=self._path("listed/a"))]
        if later != [self._path("listed/b"), self._path("listed/c")]:
            return problem("list", "A listing does not begin after the given path: trims would find no objects.")
        return ok("list", "in order, and what was just written is there")

    def _delete(self) -> Line:
        path = self._path("object")
        self._store.delete(path)
        self._store.delete(path)  # deleting an absent object is no error
        with suppress(NotFound):
            self._store.get(path)
            return problem("delete", f"{self._store.url}/{path} is still there after it was deleted.")
        return ok("delete", "what is deleted is gone")

    # --- conditional writes ------------------------------------------------------------------------------------

    def _create_once(self) -> Line:
        path = self._path("once")
        self._store.put_if(path, b"first", ABSENT)
        with suppress(AlreadyExists):
            self._store.put_if(path, b"second", ABSENT)
            return problem("create once", f"The store overwrote an object that must not exist: {_UNSAFE}")
        if bytes(self._store.get(path).data) != b"first":
            return problem("create once", f"A refused write took effect: {_UNSAFE}")
        return ok("create once", "a second one is refused")

    def _replace(self) -> Line:
        what, path = "replace if unchanged", self._path("versions")
        old = self._store.put_if(path, b"first", ABSENT)
        new = self._store.put_if(path, b"second", Match(old))
        if new == old:
            return problem(what, f"The store gives one version to different contents: {_UNSAFE}")
        for version in (old, _never(new)):
            with suppress(Conflict):
                self._store.put_if(path, b"third", Match(version))
                return problem(what, f"The store replaced an object of another version than was asked for: {_UNSAFE}")
        found = self._store.get(path)
        if bytes(found.data) != b"second" or found.version != new:
            return problem(what, f"A refused write took effect: {_UNSAFE}")
        return ok(what, "another version is refused")

    def _race(self, what: str, when: Precondition | None) -> Line:
        """Several threads try the same conditional write at once, several times: each time one must win."""
        unknown = 0
        with ThreadPoolExecutor(RACERS, thread_name_prefix="doctor") as pool:
            for number in range(_ROUNDS):
                path = self._path(f"{what.replace(' ', '-')}-{number}")
                condition = Match(self._store.put_if(path, b"start", ABSENT)) if when is None else when
                outcomes = list(pool.map(partial(self._run, path, condition, Barrier(RACERS)), range(RACERS)))
                winners = [racer for racer, won in enumerate(outcomes) if won]
                unknown += outcomes.count(None)
                if len(winners) > 1:
                    return problem(what, f"{len(winners)} of {RACERS} writers won the same race: {_UNSAFE}")
                if not winners and None not in outcomes:
                    return problem(what, f"None of {RACERS} writers won a race: nothing could ever be appended here.")
                if winners and bytes(self._store.get(path).data) != b"%d" % winners[0]:
                    return problem(what, f"The winner of a race was overwritten: {_UNSAFE}")
        if unknown:
            return warning(what, f"The store did not answer {unknown} of {RACERS * _ROUNDS} times: try again later.")
        return ok(what, f"one of {RACERS} writers wins, each time of {_ROUNDS}")

    def _run(self, path: str, when: Precondition, start: Barrier, racer: int) -> bool | None:
        """Whether this racer won; None if it got no answer."""
        start.wait()
        try:
            self._store.put_if(path, b"%d" % racer, when)
        except (AlreadyExists, Conflict):
            return False
        except TransientStorageError:
            return None
        return True

    # --- the clock, and leaving ----------------------------------------------------------------------------------

    def _clocks(self) -> Line:
        found = measure_skew(self._store, self._path("clock/now"), b"now", clock=self._clock)
        if found is None:
            return warning("clock", "It could not be compared: what was just written is not listed.")
        skew = abs(found) / _SECOND
        if skew <= _SKEW:
            return ok("clock", "within a second of the store's" if skew < 1 else f"{skew:.1f} s off the store's")
        which = "behind" if found < 0 else "ahead of"
        message = f"This machine's clock is {show.seconds(skew)} {which} the store's"
        return warning("clock", f"{message}: correct the one that is wrong, since ages are computed from both.")

    def _clean(self) -> Line | None:
        try:
            for item in list(self._store.list(f"{self.folder}/")):
                self._store.delete(item.path)
        except StorageError as error:
            return warning("cleaning up", f"{self._store.url}/{self.folder} could not be removed: {error}")
        return None


def _never(version: Version) -> Version:
    """A version of no content."""
    return Version(version[:-1] + ("0" if version[-1:] != "0" else "1"))


def log_lines(store: ObjectStore, *, env: Env = SYSTEM) -> Iterator[Line]:
    """Checks of the log in a store, if there is one."""
    try:
        log = open_log(store, env=env)
        head, states = log.head(), log.slots.list()
    except WrongKind as error:
        yield problem("log", str(error))
        return
    except NotALog:
        yield ok("log", f"there is none at {store.url} yet")
        return
    except StrandlineError as error:
        yield problem("log", str(error))
        return
    yield ok("log", f"offsets {head.floor:,} to {head.next_offset:,}; it {show.policy(log.identity.retention)}")
    invalid = [state.name for state in states if state.invalid is not None]
    if invalid:
        names = ", ".join(map(repr, invalid))
        yield warning("slots", f"{names} pin nothing any more: see 'strandline slots', and reset or drop them.")
    yield from _ahead(head, states, env.clock.now())
    since = head.trim_began or min((entry.listed for entry in head.tail), default=env.clock.now())
    idle = (env.clock.now() - since) / _SECOND
    if log.identity.retention != FOREVER and idle > _LONG_AGO:
        message = f"Nothing was trimmed for {show.seconds(idle)}: run 'strandline trim' now and then, or a consumer."
        yield warning("trim", message)


def _ahead(head: Head, states: Sequence[SlotState], now: int) -> Iterator[Line]:
    """Times in the log that are ahead of this machine's clock: which clock was wrong, and by how much."""
    times = [("The last trim", "a trimmer's", head.trim_began - now)]
    times += [("The newest batch", "a producer's", head.listed - now)]
    times += [(f"Slot {state.name!r}", "its consumer's", state.last_seen - now) for state in states]
    for what, whose, ahead in times:
        if ahead > TOLERANCE:
            late = f"{what} is {show.seconds(ahead / _SECOND)} ahead of this machine's clock: {whose} clock was ahead"
            yield warning("times", f"{late}, or this one is behind. The next rounds of trimming set it right.")


def other_line(url: str) -> Line | None:
    """The other content at an address on this machine; then nothing is tried there. None if there is none."""
    folder = folder_at(url)
    if folder is None:
        return None
    there = contents_at(str(folder))
    if is_free(there) or there.kinds == {FolderKind.OBJECT_LOG}:
        return None
    try:
        refuse_others(there, FolderKind.OBJECT_LOG)
    except NotALog as error:
        return problem("place", str(error))
    return None


def disk_line(url: str) -> Line | None:
    """Free space, for a folder on this machine; None for anything else."""
    folder = folder_at(url)
    if folder is None:
        return None
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < _LITTLE:
        worst = problem if free < _NOTHING else warning
        return worst("disk", f"There are only {show.size(free)} left at {existing}: make room.")
    return ok("disk", f"{show.size(free)} free")
