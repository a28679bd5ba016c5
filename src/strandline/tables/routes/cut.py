"""A cut: versions of several tables that have the state of one common offset of their log."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput, NotReady
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.opening import existing

_MOST_COMMITS: Final = 10_000
"""Commits of a table that are searched, from the newest on."""


@dataclass(frozen=True, slots=True)
class TablesCut:
    """One offset of a log, and for each table the version (of Iceberg the snapshot) that has exactly its state."""

    log_id: UUID
    next: int
    """Records below are in all of the tables, as far as these take them, and none at or above it."""
    versions: Mapping[str, int]
    """By the table's address, or its identifier in a catalog."""


@checked
def cut(tables: Iterable[MaintainedTable | Address], *, options: Mapping[str, str] | None = None) -> TablesCut:
    """The newest offset of which each of some tables of one log has a version; reads no record and no row.

    ``tables`` are sinks, or addresses as :func:`~strandline.tables.existing` takes them; ``options`` are those of the
    store. Followers of a route commit to all its tables at one offset about once a minute, and when they stop. Read the
    versions by time travel, as ``deltalake.DeltaTable(url, version=…)``; they are there as long as the tables keep
    their history.

    ``NotReady`` if there is no common offset, and ``InvalidInput`` for tables of different logs, or of a database,
    which keeps no earlier versions.
    """
    sinks = [one if isinstance(one, MaintainedTable) else existing(one, options=options) for one in tables]
    if not sinks:
        raise InvalidInput("A cut needs at least one table.")
    logs = {sink.followed_log(): sink.where for sink in sinks}
    if len(logs) > 1:
        named = " and ".join(f"{where} follows log {log_id}" for log_id, where in sorted(logs.items(), key=str)[:2])
        raise InvalidInput(f"Tables of different logs have no common offset: {named}.")
    (log_id,) = logs
    found = {sink.where: dict(_decreasing(sink.committed_versions(log_id))) for sink in sinks}
    common = set[int].intersection(*[set(versions) for versions in found.values()])
    if not common:
        raise NotReady(
            "The tables have no version of one common offset: their followers commit to all of them together about "
            "once a minute, and when they stop. Try again later."
        )
    offset = max(common)
    return TablesCut(log_id, offset, {where: versions[offset] for where, versions in found.items()})


def _decreasing(commits: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The newest version of each offset, without those that a restore has undone."""
    lowest = None
    for offset, version in itertools.islice(commits, _MOST_COMMITS):
        if lowest is None or offset < lowest:
            lowest = offset
            yield offset, version
