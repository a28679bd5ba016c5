"""One process from one file: starts the parts, changes them as the file changes, and stops them in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from strandline.errors import InvalidInput, NotFound, StrandlineError
from strandline.log.lag import LogLag
from strandline.serve.config.changes import Changes, PartName, changes, in_force
from strandline.serve.config.settings import LogSection, Settings
from strandline.serve.log_state import measure_lag
from strandline.serve.parts.followers import (
    Logs,
    NamedFollower,
    RunningIngest,
    SnapshotRounds,
    TableFollower,
    WatchedTable,
)
from strandline.serve.parts.logs import Opening, ServedLog, TierRounds, TrimRounds
from strandline.serve.parts.rounds import RoundPart, Rounds
from strandline.serve.parts.states import PartState, why_not_ready
from strandline.serve.parts.supervised import Part, Supervised

_LAG_EVERY: Final = 5.0
"""Seconds between two measurements of the lag of tables and ingests."""
_LOGGER: Final = logging.getLogger("strandline.serve")

# What is stopped first: who appends and who follows, then rounds, then the logs themselves.
_ORDER: Final = (("lag",), ("ingest", "tables"), ("trim", "cold", "snapshots"), ("logs",))


class Server:
    """All parts of the process, apart from HTTP. Parts fail, and are tried again, each for itself."""

    def __init__(self, settings: Settings, access: Opening, folder: str | None) -> None:
        """Nothing runs yet. ``folder`` is the server's own; None for a look at a log, which stores nothing."""
        self.settings = settings
        self._access, self._folder = access, folder
        self._rounds = Rounds(access.env)
        self._served: dict[str, ServedLog] = {}
        self._logs = Logs(self._served, access)
        self._tables: dict[str, TableFollower] = {}
        self._parts: dict[PartName, Part] = {}
        self._lags: dict[PartName, LogLag | None] = {}
        self._changing = threading.Lock()
        self._stopping = False

    # --- what it runs ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all parts; returns at once, while logs are still recovered."""
        with self._changing:
            for section in ("logs", "ingest", "tables", "snapshots"):
                for name in getattr(self.settings, section):
                    self._start(PartName(section, name))
            self._parts[PartName("lag", "all")] = self._rounds.add(PartName("lag", "all"), self._measure)

    def change(self, wanted: Settings) -> Changes:
        """Apply other settings as far as that needs no restart; the result says what was not applied."""
        with self._changing:
            if self._stopping:
                return Changes()
            found = changes(self.settings, wanted)
            self.settings = in_force(self.settings, wanted)
            for section in ("ingest", "tables", "snapshots", "logs"):  # the logs after whoever follows them
                for part in found.stop:
                    if part.section == section:
                        self._end(part, stays=part in found.start)
            for section in ("logs", "ingest", "tables", "snapshots"):
                for part in found.start:
                    if part.section == section:
                        self._start(part)
        for line in found.lines():
            _LOGGER.info("Settings: %s.", line)
        return found

    def _start(self, part: PartName) -> None:
        given = getattr(self.settings, part.section)[part.name]
        match part.section:
            case "logs":
                self._start_log(part, given)
            case "ingest":
                self._follow(part, RunningIngest(given, self._logs).run)
            case "tables":
                kind = TableFollower if given.by is None else NamedFollower
                follower = self._tables[part.name] = kind(given, self._logs)
                if given.follow:
                    self._follow(part, follower.run)
                else:
                    self._parts[part] = self._watch(part, WatchedTable(given, self._logs, follower), follower)
            case "snapshots":
                if self._folder is None:
                    raise InvalidInput(f"{part} needs a folder of the server.")
                self._parts[part] = self._rounds.add(
                    part, SnapshotRounds(part.name, given, self._folder, self._logs).round
                )

    def _start_log(self, part: PartName, given: LogSection) -> None:
        if part.name not in self._served:
            served = self._served[part.name] = ServedLog(part.name, given, self._access)
            self._parts[part] = self._rounds.add(part, served.look, served.close)
        served = self._served[part.name]
        served.settings = given
        if given.trim is not None:
            rounds = TrimRounds(served, given, self._access.env)
            self._add_rounds(PartName("trim", part.name), rounds.round, rounds.close)
        if given.cold is not None and given.node is None:  # a node tiers its own log
            tiers = TierRounds(served, given.cold, self._folder, self._access)
            self._add_rounds(PartName("cold", part.name), tiers.round, tiers.close)

    def _add_rounds(
        self, part: PartName, round_: Callable[[threading.Event], float], close: Callable[[], None]
    ) -> None:
        self._parts[part] = self._rounds.add(part, round_, close)

    def _follow(self, part: PartName, run: Callable[[threading.Event, Callable[[int | None], None]], None]) -> None:
        supervised = self._parts[part] = Supervised(part, run, self._access.env)
        supervised.start()

    def _watch(self, part: PartName, watched: WatchedTable, follower: TableFollower) -> RoundPart:
        def look(stop: threading.Event) -> float:
            del stop
            with follower.reached() as log:
                added.keeper.works(watched.position(log))
            return _LAG_EVERY

        added = self._rounds.add(part, look)
        return added

    def _end(self, part: PartName, *, stays: bool) -> None:
        """Stop a part; a log whose rounds change stays open."""
        names = [part]
        if part.section == "logs":
            names = [PartName("trim", part.name), PartName("cold", part.name), *([] if stays else [part])]
        self._stop_all([name for name in names if name in self._parts], self.settings.process.drain)
        for name in names:
            self._parts.pop(name, None)
        if part.section == "logs" and not stays:
            self._served.pop(part.name, None)
        if part.section == "tables":
            self._tables.pop(part.name, None)

    # --- what it tells -----------------------------------------------------------------------------------------

    def served(self, name: str) -> ServedLog:
        """The log of a name, open or not; ``KeyError`` if the file has none."""
        return self._served[name]

    def log_of(self, part: PartName) -> str:
        """The log that a part is of, by its name in the file or its address."""
        given = getattr(self.settings, part.section, {}).get(part.name)
        return str(getattr(given, "log", None) or getattr(given, "target", None) or part.name)

    def lag_of(self, part: PartName) -> LogLag | None:
        """The lag of a table or an ingest, as it was last measured; None if it is not known."""
        return self._lags.get(part)

    def add_rounds(self, part: PartName, round_: Callable[[threading.Event], float]) -> RoundPart:
        """Rounds of whatever runs beside the parts."""
        return self._rounds.add(part, round_)

    def log(self, name: str) -> Any:
        """The log of a name; ``NotFound`` if the file has none, ``NotReady`` while it is not open."""
        if name not in self._served:
            raise NotFound(f"There is no log {name!r} here: the file of the server has no [logs.{name}].")
        return self._served[name].log

    def table(self, name: str) -> TableFollower:
        """The follower of a table, which may be paused; ``NotFound`` if the file has none of this name."""
        if name not in self._tables:
            raise NotFound(f"There is no table {name!r} here: the file of the server has no [tables.{name}].")
        return self._tables[name]

    def members(self, name: str) -> list[dict[str, Any]]:
        """The tables of a section that makes one for each name; none of any other."""
        found = self._tables.get(name)
        return [] if found is None else found.members()

    def states(self) -> list[PartState]:
        """All parts as they are now, the logs first."""
        return [part.state for name, part in sorted(self._parts.items()) if name.section != "lag"]

    def part(self, name: PartName) -> Part:
        """A part, to be paused and resumed; ``NotFound`` if there is none."""
        found = self._parts.get(name)
        if found is None or name.section == "lag":
            known = ", ".join(str(state.part) for state in self.states())
            raise NotFound(f"There is no part {name} here; there are {known or 'none'}.")
        return found

    def why_not_ready(self) -> str | None:
        """Why it is not ready; None when the recovery of its logs is done."""
        if self._stopping:
            return "it is stopping"
        return why_not_ready(self.states()) or next(filter(None, map(_node_waits, [*self._served.values()])), None)

    def why_failed(self) -> str | None:
        """Why the process should be restarted; None if it works: parts that fail are no reason."""
        return "the scheduler of its rounds has ended" if self._rounds.has_failed else None

    def _measure(self, stop: threading.Event) -> float:
        """Measure the lag of all that follow a log of the file."""
        followed = [(PartName("tables", name), each.log, each.sink) for name, each in self.settings.tables.items()]
        followed += [(PartName("ingest", name), one.source, one.target) for name, one in self.settings.ingest.items()]
        for part, source, target in followed:
            if stop.is_set():
                break
            running = self._parts.get(part)
            if running is None or source not in self._served:
                continue
            try:
                log = self._served[source].log
            except StrandlineError:
                continue
            now = self._access.env.clock.now()
            self._lags[part] = measure_lag(log, (log.url, target), running.state.position, now)
        return _LAG_EVERY

    # --- its end -----------------------------------------------------------------------------------------------

    def stop(self) -> list[PartName]:
        """Stop everything in order, within the deadline of the file; returns the parts that did not end in time."""
        with self._changing:
            self._stopping = True
            clock = self._access.env.clock
            deadline = clock.monotonic() + self.settings.process.drain
            late: list[PartName] = []
            for sections in _ORDER:
                parts = [name for name in self._parts if name.section in sections]
                late += self._stop_all(parts, max(0.0, deadline - clock.monotonic()))
            for name in late:
                _LOGGER.warning("%s did not end in time, and goes on from its position at the next start.", name)
            self._rounds.close()
            return late

    def _stop_all(self, names: Iterable[PartName], seconds: float) -> list[PartName]:
        """Stop these parts side by side; returns those that have not ended within some seconds."""
        found = [(name, self._parts[name]) for name in names]
        clock = self._access.env.clock
        deadline = clock.monotonic() + seconds
        for _, part in found:
            part.stop()
        return [name for name, part in found if not part.join(max(0.0, deadline - clock.monotonic()))]


def _node_waits(served: ServedLog) -> str | None:
    """Why a node is not ready, if a log is that of one."""
    node = served.node
    why = None if node is None else node.why_not_ready()
    return None if why is None else f"the node of logs.{served.name} is not ready: {why}"
