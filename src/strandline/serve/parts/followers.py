"""Tables and ingests of a server: followed in a thread each, from the position that the table or the log holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from strandline.bulk.snapshot_building import build_snapshot
from strandline.errors import Unsupported
from strandline.followers.routes.follower import RouteFollower
from strandline.followers.routes.progress import MemberProgress, RouteOptions
from strandline.followers.run import follow
from strandline.ingestion.api import ingest
from strandline.ingestion.run import IngestProgress
from strandline.model.addresses import ParsedAddress
from strandline.model.cursor import parse_start
from strandline.serve.config.settings import IngestSection, SnapshotSection, TableSection
from strandline.serve.parts.logs import Opening, ServedLog
from strandline.serve.parts.table_repairs import TableRepairs
from strandline.snapshots.artifacts import Artifacts
from strandline.storage.closing import Closing
from strandline.storage.task_pool import ThreadPool
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.following import followed, followed_value
from strandline.tables.maintain.opening import recorded_at
from strandline.tables.routes.named import NamedTables, named
from strandline.tables.rows.partitions import Layout, Upkeep

Report = Callable[[int | None], None]
"""Gets the position, whenever it has moved."""


class Logs:
    """The logs that other parts name: those of the file, which are open, and any by address."""

    def __init__(self, served: dict[str, ServedLog], access: Opening) -> None:
        self.served, self.access = served, access

    @contextlib.contextmanager
    def reached(self, name: str, *, writes: bool = False) -> Iterator[Any]:
        """The log of a name or an address, within the block."""
        if name in self.served:
            found = self.served[name]
            # The log of a node as its own process reads it; others append over Flight, wherever the primary is.
            yield found.log if writes or found.node is None else found.node
            return
        with self.access.open(name) as log:
            yield log


class TableFollower:
    """A table that this process keeps in step with its log."""

    def __init__(self, given: TableSection, logs: Logs) -> None:
        self._given, self._logs = given, logs
        self._repairs = TableRepairs(self.sink, given.slot)

    @property
    def repairs(self) -> TableRepairs:
        """What operators ask of the table."""
        return self._repairs

    def members(self) -> list[dict[str, Any]]:
        """The tables that it is, if it is many."""
        return []

    def run(self, stop: threading.Event, report: Report) -> None:
        """Follow until it is stopped; builds the table again first, if that was asked."""
        given, env = self._given, self._logs.access.env
        with self.reached() as log:
            self.repairs.rebuild_if_wanted(log)
            sink = self.sink(log)
            sink.meet(log)
            since = sink.cursor(log.log_id)
            report(None if since is None else since.next)
            follow(
                log,
                cast("Any", sink),
                given.slot,
                start=parse_start(str(given.start)),
                stop=stop,
                on_progress=lambda cursor: report(cursor.next),
                env=env,
            )

    @contextlib.contextmanager
    def reached(self) -> Iterator[Any]:
        """The log that it follows, within the block."""
        with self._logs.reached(self._given.log) as log:
            yield log

    def sink(self, log: Any, name: str = "") -> MaintainedTable:
        """The sink: as the table records it, or for a new one as the file says; of many tables that of a name."""
        given, access = self._given, self._logs.access
        address, options = named(given.sink, name), access.options(given.options)
        recorded = recorded_at(address, options)
        upkeep = None if given.upkeep is None else Upkeep(hours=float(given.upkeep) / 3600)
        schema = given.schema and named(given.schema, name)
        return followed(
            address,
            recorded,
            mode=given.mode,
            letters=given.dead_letters and named(given.dead_letters, name),
            layout=Layout(given.partition_by, given.cluster_by, upkeep),
            options=options,
            value=followed_value(
                log, recorded, schema=schema, envelope=given.envelope, raw=given.raw, disk=access.env.disk
            ),
            key=given.key,
            tombstones=given.tombstones,
        )


class NamedFollower(TableFollower):
    """A table for each name among the records of a log, all followed by this process."""

    def __init__(self, given: TableSection, logs: Logs) -> None:
        super().__init__(given, logs)
        self._follower: RouteFollower | None = None

    @property
    def repairs(self) -> TableRepairs:
        """None of many tables at once."""
        raise Unsupported(
            f"{self._given.sink} is many tables: repair one of them by 'strandline table letters', 'replay' or "
            "'rebuild', with its own address."
        )

    def run(self, stop: threading.Event, report: Report) -> None:
        """Follow until it is stopped; a table that fails is tried again, and stops no other."""
        given, env = self._given, self._logs.access.env
        tables = NamedTables(given.sink, given.by or "", given.unrouted, given.without, given.names)
        with self.reached() as log:
            route = tables.route(partial(self.sink, log), self._logs.access.options(given.options))
            options = RouteOptions(parse_start(str(given.start)), slot=given.slot, holder=str(env.chance.uuid()))
            self._follower = RouteFollower(log, route, options, env, on_progress=lambda cursor: report(cursor.next))
            report(None)
            self._follower.run(stop)

    def members(self) -> list[dict[str, Any]]:
        """Each table of the names that there are."""
        follower = self._follower
        return [] if follower is None else [member_fields(one) for one in follower.progress().tables]


def member_fields(seen: MemberProgress) -> dict[str, Any]:
    """One table of a route."""
    return {
        "name": seen.name,
        "status": seen.state,
        "position": seen.next,
        "records": seen.records,
        "dead_letters": seen.bad_records,
        "error": seen.error or None,
    }


class WatchedTable:
    """A table that another process follows: this one looks how far it is."""

    def __init__(self, given: TableSection, logs: Logs, follower: TableFollower) -> None:
        self._given, self._logs, self._follower = given, logs, follower
        self._sink: MaintainedTable | None = None

    def position(self, log: Any) -> int | None:
        """Offsets below are in the table; None before the other process has begun."""
        given = self._given
        if self._sink is None:
            if recorded_at(given.sink, self._logs.access.options(given.options)) is None:
                return None
            self._sink = self._follower.sink(log)
            self._sink.meet(log)
        cursor = self._sink.cursor(log.log_id)
        return None if cursor is None else cursor.next


class RunningIngest:
    """An ingest that goes on at the end of its source."""

    def __init__(self, given: IngestSection, logs: Logs) -> None:
        self._given, self._logs = given, logs

    def run(self, stop: threading.Event, report: Report) -> None:
        """Ingest until it is stopped."""
        given, logs = self._given, self._logs
        with contextlib.ExitStack() as opened:
            target: Any = given.target  # by its address it is made if there is none
            if given.target in logs.served or ParsedAddress.of(given.target).is_node:
                target = opened.enter_context(logs.reached(given.target, writes=True))
            source: Any = given.source
            more: dict[str, Any] = {}
            if given.source in logs.served:
                source = opened.enter_context(logs.reached(given.source))
            elif ParsedAddress.of(given.source).is_node:
                source = logs.access.open(given.source)
                if isinstance(source, Closing):
                    opened.enter_context(source)
            elif given.config:
                more["source_options"] = {"config": logs.access.options(given.config)}
            report(None)

            def on_progress(progress: IngestProgress) -> None:
                report(progress.next)

            ingest(
                source,
                target,
                follow=True,
                slot=given.slot,
                start=parse_start(str(given.start)),
                skip_trimmed=given.skip_trimmed,
                stop=stop,
                on_progress=on_progress,
                env=logs.access.env,
                **more,
            )


class SnapshotRounds:
    """Builds and publishes the newest values of a log, again and again."""

    def __init__(self, name: str, given: SnapshotSection, folder: str, logs: Logs) -> None:
        self._given, self._logs = given, logs
        self._folder = f"{folder}/snapshots/{name}"

    def round(self, stop: threading.Event) -> float:
        """One snapshot, unless the published one is that of the log's end."""
        del stop
        given, disk = self._given, self._logs.access.env.disk
        artifacts = Artifacts(given.publish)
        with self._logs.reached(given.log) as log:
            newest, end = artifacts.newest(), log.end()
            if newest is None or (newest.cursor.log_id, newest.cursor.next) != (end.log_id, end.next):
                disk.make_folders(self._folder.rpartition("/")[0])
                build_snapshot(log, self._folder, kind=given.kind, publish=artifacts, pool=ThreadPool(1))
                disk.remove_folder(self._folder)
        return max(1.0, float(given.every))
