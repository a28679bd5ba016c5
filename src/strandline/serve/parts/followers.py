"""Tables and ingests of a server: followed in a thread each, from the position that the table or the log holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from strandline.bulk.snapshot_building import build_snapshot
from strandline.errors import InvalidInput
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
from strandline.tables.maintain.opening import followed, is_in_database, recorded_at, value_of
from strandline.tables.rows.partitions import Layout, Upkeep
from strandline.values.codecs.structs import Json
from strandline.values.schema.files import json_codec

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

    def sink(self, log: Any) -> MaintainedTable:
        """The sink: as the table records it, or for a new one as the file says."""
        given, access = self._given, self._logs.access
        options = access.options(given.options)
        recorded = recorded_at(given.sink, options)
        if given.raw:
            value: Any = None
        elif given.schema is not None:
            value = json_codec(given.schema, access.env.disk)
        elif recorded is not None and recorded.inferred is not None:
            value = Json(recorded.inferred)
        else:
            value = value_of(log)
        shape: dict[str, Any] = {"value": value, "key": given.key, "tombstones": given.tombstones}
        letters: Any = given.dead_letters
        if is_in_database(given.sink):
            if letters not in (None, "yes") or given.partition_by or given.cluster_by or given.upkeep is not None:
                raise InvalidInput(
                    f"{given.sink} is in a SQL database, which looks after its tables itself: leave out partition_by, "
                    "cluster_by and upkeep, and write dead_letters = 'yes'."
                )
            letters = None if letters is None else True
        else:
            known = (None if recorded is None else recorded.layout) or Layout()
            upkeep = None if given.upkeep is None else Upkeep(hours=float(given.upkeep) / 3600)
            shape["layout"] = Layout(
                given.partition_by or known.partition_by, given.cluster_by or known.cluster_by, upkeep
            )
        return followed(given.sink, recorded, mode=given.mode, letters=letters, inferred=None, options=options, **shape)


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
