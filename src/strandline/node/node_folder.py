"""The node folder: durable node state, the copy of the log, bootstrap snapshots and quarantine."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import replace
from typing import Any, Final, final

from strandline.errors import CorruptData, Fenced, InvalidInput, NotFound
from strandline.formats.node.state import decode_node, encode_node
from strandline.log.folders import FolderKind, check_new
from strandline.model.node import NodeState
from strandline.node.members.rules import is_newer
from strandline.node.tickets import Tickets
from strandline.storage.closing import Closing
from strandline.storage.disk import below, exists, make_own_folder, replace_file
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child

STATE: Final = "node.json"
TICKETS: Final = "tickets.json"
LOCK: Final = "node.lock"
INCOMING: Final = "incoming"
SNAPSHOTS: Final = "snapshots"
QUARANTINE: Final = "quarantine"
_DATA: Final = re.compile(r"data-([0-9]{8})")
TERM_STEP: Final = 1 << 24
"""Largest step above the highest term seen: a year of elections, one every two seconds."""

HIGHEST_TERM: Final = 1 << 62
"""The highest term: a frame could not hold the next one."""


def check_rise(seen: int, reported: int, who: str) -> int:
    """The term ``reported``, if elections can have raised it there from ``seen``; ``Fenced`` otherwise.

    >>> check_rise(4, 6, "a")
    6
    """
    if reported > min(seen + TERM_STEP, HIGHEST_TERM):
        raise Fenced(
            f"{who[:200]} reports term {reported}, but the highest that this node has seen is {seen}: no election "
            "raises it so far, and nothing was changed. Check that node."
        )
    return reported


def plausible_term(in_log: int, *remembered: int) -> int:
    """The highest stored term that elections can have reached from the term of the last record.

    >>> plausible_term(4, 5, 1 << 60)
    5
    """
    return max(in_log, *(term for term in remembered if term <= in_log + TERM_STEP))


@bound_to_process()
@final
class NodeFolder(Closing):
    """The folder of a node, locked by one process. State is durable once :meth:`remember` returns.

    It holds the disk, the clock and the random source of the node. ``data-N`` holds the copy of the log. A
    bootstrap builds ``data-N+1`` beside it; storing the new number swaps them.
    """

    def __init__(self, folder: str, state: NodeState, *, env: Env, background: bool) -> None:
        self.folder = folder
        self.env = env
        self.background = background
        """Whether the log of a primary commits in a thread of its own; tests step it by hand."""
        self.tickets = Tickets(f"{folder}/{TICKETS}", env=env)
        """The keys that the nodes of the log share, to sign tickets for reads."""
        self._state = state
        self._lock = threading.Lock()
        self._held = contextlib.ExitStack()
        self._origin = Origin(f"The node in {folder}", self)
        call_in_child(self, NodeFolder._after_fork)

    def _after_fork(self) -> None:
        self._held.close()  # only this process's part of the lock

    @classmethod
    def open(cls, folder: str, name: str, *, env: Env = SYSTEM, background: bool = True) -> NodeFolder:
        """Open the folder of a node, or create one. ``Fenced`` while another process has it open.

        ``InvalidInput`` if the folder belongs to a node of another name (two nodes must not both count one copy),
        or to something else, such as a write-ahead log. ``CorruptData`` if it has copies of a log, but no state that
        names the current one.
        """
        path = f"{folder}/{STATE}"
        if not exists(path, disk=env.disk):
            check_new(folder, FolderKind.NODE, disk=env.disk)
        make_own_folder(folder, disk=env.disk)
        with contextlib.ExitStack() as held:
            if not held.enter_context(env.disk.try_locked(f"{folder}/{LOCK}")):
                raise Fenced(f"The node in {folder} is running already; nothing was changed. Stop it there first.")
            # The writer of the state may have been killed before its sync: a power failure must not undo what is read
            # now.
            env.disk.sync_folder(folder)
            try:
                state = decode_node(env.disk.read(path), path)
            except NotFound:
                state = NodeState(name)
                rows = env.disk.scan(folder)
                if copies := sorted(row.name for row in rows if row.is_folder and _DATA.fullmatch(row.name)):
                    raise CorruptData(
                        f"{path} is missing, and {', '.join(copies)} beside it holds a copy of a log: nothing was "
                        "changed. Restore the file; or move the folder away, and let the node bootstrap."
                    ) from None
                # Written first: copies without a state file belong to a node that lost it.
                replace_file(env.disk, path, encode_node(state), temporary=f"{path}.new")
            if state.name != name:
                raise InvalidInput(f"{folder} is the folder of node {state.name!r}, not of {name!r}: name another one.")
            node_folder = cls(folder, state, env=env, background=background)
            node_folder._held = held.pop_all()
        node_folder.sweep()
        return node_folder

    @property
    def state(self) -> NodeState:
        """The current state."""
        return self._state

    def remember(self, **changes: Any) -> NodeState:
        """Durably update the state; writes nothing if nothing changes.

        Terms, the watermark and the version of the members' record never decrease.
        """
        with self._lock:
            if not is_newer(changes.get("membership"), self._state.membership):
                changes.pop("membership", None)
            for name in ("seen", "adopted", "led", "committed"):
                if name in changes:
                    changes[name] = max(changes[name], getattr(self._state, name))
            after = replace(self._state, **changes)
            if after != self._state:
                self._write(after)
            return after

    def adopt_term(self, term: int, who: str) -> None:
        """Durably adopt a term from another node; ``Fenced``, and no change, if no election can raise it so far.

        Every term from another node passes this check.
        """
        self.remember(seen=check_rise(self._state.seen, term, who))

    def reset_term(self, term: int) -> NodeState:
        """Durably forget terms above this one. Only if no node leads in one of them."""
        with self._lock:
            state = self._state
            known = state.membership  # of a term that counts no longer, it would outlast all later records
            known = known and replace(known, term=min(known.term, term))
            after = replace(
                state, seen=term, adopted=min(state.adopted, term), led=min(state.led, term), membership=known
            )
            self._write(after)
            return after

    def _write(self, after: NodeState) -> None:
        path = f"{self.folder}/{STATE}"
        replace_file(self.env.disk, path, encode_node(after), temporary=f"{path}.new")
        self._state = after

    def data(self, generation: int) -> str:
        """The folder of a copy of the log."""
        return f"{self.folder}/data-{generation:08d}"

    def path(self, *names: str) -> str:
        """A path in this folder; ``InvalidInput`` for names that lead out of it."""
        return below(self.folder, *names)

    def next_generation(self) -> int:
        """A generation that no copy uses, not even an incomplete one."""
        return max([self._state.generation, *self._generations()]) + 1

    def sweep(self, *, keep: int | None = None) -> None:
        """Remove every copy except the current one and ``keep``."""
        for generation in self._generations():
            if generation not in (self._state.generation, keep):
                self.env.disk.remove_folder(self.data(generation))

    def _generations(self) -> list[int]:
        rows = self.env.disk.scan(self.folder)
        return [int(found[1]) for row in rows if row.is_folder and (found := _DATA.fullmatch(row.name))]

    def close(self) -> None:
        """Release the folder. Idempotent."""
        self._held.close()
