"""A running node in this process as a log, in either role: the base class of ``Primary`` and ``Replica``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from strandline.log.contract import Log, LogReading, Slots
from strandline.log.read.value_format import WithoutFormat
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import StoredAppend
from strandline.node.config import NodeConfig
from strandline.node.running import RunningNode
from strandline.storage.closing import Closing


@checked
class NodeHandle(WithoutFormat, LogReading, Closing):
    """A running node. Closing the handle stops the node. As a log it is read up to the commit watermark."""

    def __init__(self, running: RunningNode) -> None:
        self.running = running
        """The node process, for everything that this API leaves out. It refuses to be used in a forked child."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.running.name

    @property
    def _committed_log(self) -> Log:
        return self.running.node.reading()

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._committed_log.log_id

    def bounds(self) -> Bounds:
        """The first retained offset, and the next one that readers will see."""
        return self._committed_log.bounds()

    def end(self) -> Cursor:
        """The cursor at the end that readers see now."""
        return self._committed_log.end()

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at ``offset``."""
        return self._committed_log.cursor_at(offset)

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset."""
        return self.running.node.append_at(offset)

    def position_of(self, start: Start) -> int:
        """The offset of a start; whether it is retained is not checked."""
        return self._committed_log.position_of(start)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[Span]:
        """The spans after a cursor, up to what is committed; processes on the same disk can fetch them."""
        return self._committed_log.plan(since, limit)

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until there is a record to read past the cursor (True), or until the timeout (False)."""
        return self._committed_log.wait(past, timeout)

    @property
    def slots(self) -> Slots:
        """The slots of consumers, which the primary has; ``NotReady`` on a node that does not lead."""
        return self.running.node.slots

    @property
    def url(self) -> str:
        """The address for other nodes, and for ``sl.node.RemoteLog``."""
        return self.running.url

    @property
    def condition(self) -> str:
        """The node's state: leading, connecting, bootstrapping, following, fenced, gap, diverged or failed."""
        return self.running.condition

    @property
    def trouble(self) -> str | None:
        """Why the node has stopped until an operator acts, or None."""
        return self.running.trouble

    def close(self) -> None:
        """Stop, and release the lease at once. Idempotent."""
        self.running.close()


def started(folder: Address, **settings: Any) -> RunningNode:
    """Start the node of a folder; settings that are None get their default."""
    given = {name: value for name, value in settings.items() if value is not None}
    if "take_over" in given:
        given["take_over"] = as_folder(given["take_over"])
    return RunningNode(NodeConfig(folder=as_folder(folder), **given))
