"""The state of a server as JSON, and actions on it: what a request to ``/v1/…`` reads and changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import msgspec

from strandline.errors import InvalidInput, Unsupported
from strandline.log.object.log import ObjectLog
from strandline.model.cursor import parse_start
from strandline.serve.config.changes import PartName
from strandline.serve.log_state import log_state, trim_fields
from strandline.serve.parts.states import PartState, Status
from strandline.serve.server import Server
from strandline.storage.env import Env
from strandline.tier.read.tiered_log import hot_tier

_PAUSED: Final = ("tables", "ingest", "trim", "cold", "snapshots")


class SlotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slot to create."""

    name: str
    at: str | int = "now"
    dry_run: bool = False


class MoveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to move a slot."""

    at: str | int
    dry_run: bool = False


class ActRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action without further arguments."""

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
        hot = hot_tier(self._server.log(log))
        given = self._server.settings.logs[log]
        if isinstance(hot, ObjectLog):
            return trim_fields(hot.trim(grace=float(given.grace), dry_run=asked.dry_run))
        if asked.dry_run or given.retention is None:
            raise Unsupported(
                f"The log {log!r} is no object log: it has no dry run, and is trimmed by its own process, by the "
                "retention of the file."
            )
        return {"first": hot.trim(str(given.retention)), "dry_run": False}

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
