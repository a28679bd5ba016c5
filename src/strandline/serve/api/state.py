"""The state of a server as JSON, and actions on it: what a request to ``/v1/…`` reads and changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, final

import msgspec

from strandline.errors import InvalidInput, NotFound, StrandlineError, Unsupported
from strandline.log.object.log import ObjectLog
from strandline.model.addresses import PLAIN_NAME
from strandline.model.cursor import parse_start
from strandline.model.retention import as_retention, default_limits
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.replicate.replica import Condition
from strandline.serve.config.changes import PartName
from strandline.serve.log_state import log_state, trim_fields
from strandline.serve.node_state import members_with_slots, replica_slots, status_fields
from strandline.serve.parts.states import PartState, Status
from strandline.serve.server import Server
from strandline.serve.tier_state import tier_fields
from strandline.storage.env import Env
from strandline.tier.read.tiered_log import TieredLog, hot_tier

NAME: Final = PLAIN_NAME.replace(r"\A", "^").replace(r"\Z", "$")
"""The pattern of plain names, as JSON Schema writes it."""

_PAUSED: Final = ("tables", "ingest", "trim", "cold", "snapshots")


class SlotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slot to create."""

    name: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": NAME})]
    at: str | int = "now"
    dry_run: bool = False


class MoveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to move a slot."""

    at: str | int
    dry_run: bool = False


class ActRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action without further arguments."""

    dry_run: bool = False


class RetentionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a log is to keep from now on."""

    retention: str
    dry_run: bool = False


class PromoteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a node becomes the primary."""

    force: bool = False
    """Leave out the nodes that do not answer: what only they have is lost."""
    dry_run: bool = False


class RebuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the rows of a table begin."""

    start: str | int | None = None
    """None: where they began before."""
    dry_run: bool = False


@final
class ServerState:
    """What the API tells and does. Each call may block."""

    def __init__(self, server: Server, env: Env) -> None:
        self._server, self._env = server, env

    # --- telling -----------------------------------------------------------------------------------------------

    def parts(self, sees: Callable[[str], bool], section: str | None = None) -> dict[str, Any]:
        """All parts with their last error, or those of a section."""
        return {
            section or "parts": [
                self._part(state)
                for state in self._server.states()
                if (section is None or state.part.section == section) and sees(self._server.log_of(state.part))
            ]
        }

    def _part(self, state: PartState) -> dict[str, Any]:
        lag = self._server.lag_of(state.part)
        found = {
            "section": state.part.section,
            "name": state.part.name,
            "log": self._server.log_of(state.part),
            "status": str(state.status),
            "since": state.since,
            "error": state.error or None,
            "failures": state.failures,
            "position": state.position,
        }
        if state.part.section in ("tables", "ingest"):
            found["records_behind"] = None if lag is None else lag.records
            found["bytes_behind"] = None if lag is None else lag.bytes
            found["seconds_behind"] = None if lag is None else lag.seconds
        if state.part.section == "tables":
            found["tables"] = self._server.members(state.part.name)
        return found

    def logs(self, sees: Callable[[str], bool]) -> dict[str, Any]:
        """All logs of the file, without a look at any of them."""
        states = {state.part.name: state for state in self._server.states() if state.part.section == "logs"}
        return {
            "logs": [
                {
                    "name": name,
                    "address": given.address,
                    "status": str(states[name].status),
                    "error": states[name].error or None,
                }
                for name, given in self._server.settings.logs.items()
                if name in states and sees(name)
            ]
        }

    def log(self, name: str) -> dict[str, Any]:
        """One log: its bounds, its slots with their lag, and what pins the floor."""
        return {"name": name, **log_state(self._server.log(name), self._env.clock.now()).fields()}

    def segments(self, name: str) -> dict[str, Any]:
        """The segments of a log with a cold tier."""
        log, served = self._server.log(name), self._server.served(name)
        found = log if served.node is None else served.node.reading()
        if isinstance(found, TieredLog):
            return tier_fields(found)
        raise NotFound(f"The log {name!r} has no cold tier: give it one by [logs.{name}.cold] in the server's file.")

    def nodes(self, name: str) -> dict[str, Any]:
        """The nodes of a replicated log: the one of this process, and all of them as the primary sees them."""
        log, served = hot_tier(self._server.log(name)), self._server.served(name)
        if not isinstance(log, RemoteLog):
            raise NotFound(f"The log {name!r} has no nodes: it is in a bucket or a folder.")
        own = None if served.node is None else status_fields(served.node.status())
        try:
            seen = members_with_slots(log.topology(), replica_slots(log), self._env.clock.now())
        except StrandlineError as error:  # there may be no primary now, which is what a caller wants to know
            return {"node": own, "topology": None, "error": str(error)}
        return {"node": own, "topology": seen, "error": None}

    # --- acting ------------------------------------------------------------------------------------------------

    def create_slot(self, log: str, asked: SlotRequest) -> dict[str, Any]:
        """Create a slot; it pins everything from its position on."""
        found = self._server.log(log)
        position = _position(found, asked.at)
        if asked.dry_run:
            return {"slot": asked.name, "position": position, "dry_run": True}
        made = found.slots.create(asked.name, position)
        return {"slot": made.name, "position": made.position, "epoch": made.epoch, "dry_run": False}

    def reset_slot(self, log: str, slot: str, asked: MoveRequest) -> dict[str, Any]:
        """Move a slot, and make it valid again; its holder is fenced."""
        found = self._server.log(log)
        before, position = found.slots.get(slot), _position(found, asked.at)
        fields = {"slot": slot, "from": before.position, "fences": before.holder, "dry_run": asked.dry_run}
        if asked.dry_run:
            return {**fields, "position": position}
        moved = found.slots.reset(slot, position)
        return {**fields, "position": moved.position, "epoch": moved.epoch}

    def drop_slot(self, log: str, slot: str, asked: ActRequest) -> dict[str, Any]:
        """Remove a slot; what only it pinned may be deleted."""
        found = self._server.log(log)
        before = found.slots.get(slot)
        if not asked.dry_run:
            found.slots.drop(slot)
        return {"slot": slot, "position": before.position, "held_by": before.holder, "dry_run": asked.dry_run}

    def trim(self, log: str, asked: ActRequest) -> dict[str, Any]:
        """Trim a log now."""
        self._server.log(log)
        hot = self._server.served(log).trimmable()
        given = self._server.settings.logs[log]
        if isinstance(hot, ObjectLog):
            return trim_fields(hot.trim(grace=float(given.grace), dry_run=asked.dry_run))
        if asked.dry_run or given.retention is None:
            raise Unsupported(
                f"The log {log!r} is no object log: it has no dry run, and is trimmed by its own process, by the "
                "retention of the file."
            )
        return {"first": hot.trim(str(given.retention)), "dry_run": False}

    def retain(self, log: str, asked: RetentionRequest) -> dict[str, Any]:
        """Change what a log keeps; the next trim applies it."""
        hot, policy = hot_tier(self._server.log(log)), as_retention(asked.retention)
        given = self._server.settings.logs[log]
        if not isinstance(hot, ObjectLog):
            raise Unsupported(f"Retention is stored with object logs; that of {log!r} is in the file of its process.")
        if (given.retention, given.slot_lag, given.slot_idle) != (None, None, None):
            raise InvalidInput(
                f"The server's file says what {log!r} keeps, and would say it again: change that, and reload the file."
            )
        before = hot.identity
        limits = before.limits if policy == before.retention else default_limits(policy)
        if not asked.dry_run:
            hot.set_retention(policy, limits)
        return {
            "from": str(before.retention),
            "retention": str(policy),
            "lag_bytes": limits.lag_bytes or None,
            "idle_seconds": limits.idle_seconds or None,
            "dry_run": asked.dry_run,
        }

    def promote(self, log: str, asked: PromoteRequest) -> dict[str, Any]:
        """Make the node of this process the primary, if that loses nothing committed.

        A dry run asks no other node: one that is asked for its report refuses lower terms from then on.
        """
        self._server.log(log)
        node = self._server.served(log).node
        if node is None:
            raise NotFound(f"The log {log!r} has no node in this process: promote one where it runs.")
        before = node.status()
        leads = before.condition == Condition.LEADING
        if not leads and not asked.dry_run:
            node.promote(force=asked.force)
        return {
            "was": before.condition,
            "promoted": not leads and not asked.dry_run,
            "node": status_fields(before if asked.dry_run else node.status()),
            "dry_run": asked.dry_run,
        }

    # --- tables ------------------------------------------------------------------------------------------------

    def letters(self, table: str) -> dict[str, Any]:
        """The dead letters of a table, by reason."""
        found = self._server.table(table)
        with found.reached() as log:
            return found.repairs.letters(log)

    def replay(self, table: str, asked: ActRequest) -> dict[str, Any]:
        """Apply the dead letters of a table that can become rows by now."""
        found = self._server.table(table)
        with found.reached() as log:
            return {**asdict(found.repairs.replay(log, dry_run=asked.dry_run)), "dry_run": asked.dry_run}

    def rebuild(self, table: str, asked: RebuildRequest) -> dict[str, Any]:
        """Build a table again from its log, and follow on; its follower does that, and the answer does not wait."""
        found, part = self._server.table(table), PartName("tables", table)
        if not self._server.settings.tables[table].follow:
            raise InvalidInput(f"Another process follows the table {table!r}: build it again there.")
        start = parse_start(asked.start) if isinstance(asked.start, str) else asked.start
        with found.reached() as log:
            planned = found.repairs.planned(log, start)
        if not asked.dry_run:
            running = self._server.part(part)
            running.pause()
            found.repairs.want(start)
            running.resume()
        return {"part": str(part), **asdict(planned), "dry_run": asked.dry_run}

    def log_in(self, names: Mapping[str, str]) -> str:
        """The log that a path is of; empty for a path of no log."""
        table = self._server.settings.tables.get(names.get("table", ""))
        return names.get("log", "") if table is None else table.log

    def switch(self, part: PartName, verb: str, asked: ActRequest) -> dict[str, Any]:
        """Pause or resume a part."""
        found = self._server.part(part)
        if part.section not in _PAUSED:
            raise InvalidInput(f"{part} is not paused: those are parts of {', '.join(_PAUSED)}.")
        if not asked.dry_run:
            (found.pause if verb == "pause" else found.resume)()
        state = found.state
        will = Status.PAUSED if verb == "pause" else Status.STARTING
        return {"part": str(part), "status": str(will if asked.dry_run else state.status), "dry_run": asked.dry_run}


def _position(log: Any, at: str | int) -> int:
    start = parse_start(at) if isinstance(at, str) else at
    if not isinstance(start, int):
        return int(log.position_of(start))
    if not 0 <= start <= log.bounds().next:
        raise InvalidInput(
            f"The log ends at offset {log.bounds().next}: a slot is at an offset from 0 to that, not {start}."
        )
    return start
