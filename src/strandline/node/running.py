"""A node process: Flight server plus the node's control thread. As a log it is read up to the commit watermark."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, TypeVar
from uuid import UUID

import pyarrow as pa

from strandline.errors import NotReady, StrandlineError
from strandline.log.contract import READING, Log, LogReading, Slots
from strandline.log.read.value_format import WithoutFormat
from strandline.model.addresses import as_folder
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import StoredAppend
from strandline.node.config import LEASE, NodeConfig
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.server.server import FlightNode
from strandline.node.lead.tiering import NodeColdTier
from strandline.node.members.rules import addresses
from strandline.node.messages import NodeStatus, Upstream
from strandline.node.node import Node
from strandline.node.node_folder import NodeFolder
from strandline.node.node_metrics import show_metrics
from strandline.node.replicate.replica import Condition
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.lease import Lease
from strandline.storage.objects.urls import open_store
from strandline.tier.copy.rounds import run_rounds

__all__ = ["NodeConfig", "RunningNode"]

_LOGGER = logging.getLogger(__name__)
_LONGEST_HEARTBEAT: Final = 1.0
"""Longest heartbeat interval of a stream: receivers give up a connection after five seconds of silence."""

_CLOSE_SECONDS: Final = 2.0
"""Seconds for which closing waits for running calls before it closes their connections."""

_LOOK: Final = 0.02


T = TypeVar("T")


@bound_to_process(
    own=(*READING, "start", "read", "cursor_at", "append_at", "log_id")
)  # they use the node, which checks
@checked
class RunningNode(WithoutFormat, LogReading, Closing):
    """A node with its server and its control thread. As a log it is read up to the commit watermark.

    :meth:`close`, or the end of the block, stops the server and the control thread, and releases the folder and the
    lease. If the control thread fails (a bug: faults of network, disk or other nodes do not cause it), the node steps
    down at once and keeps the error in :attr:`failure`; its copy can still be read.

    >>> import tempfile
    >>> config = NodeConfig(folder=tempfile.mkdtemp() + "/a", name="a", lead=True, create=True)
    >>> with RunningNode(config) as running:
    ...     running.condition, running.url.rpartition(":")[0]
    ('leading', 'grpc://127.0.0.1')
    """

    def __init__(self, config: NodeConfig, *, env: Env = SYSTEM) -> None:
        """Open the folder, start the server and the control thread. Raises, with nothing left open, if one fails."""
        self.config = config
        self.name = config.name
        """The node's name."""
        self._client = config.client
        self._env = env
        self._stop = threading.Event()
        self._wake = threading.Event()
        """Set when a request is queued, or the node stops: the control thread need not sleep on."""
        self._requests: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._requesting = threading.Lock()
        self._why_ended: str | None = None
        """Why the control thread takes no more requests."""
        self._closing = threading.Lock()
        self._closed = False
        self._ended = threading.Event()
        """Set by the control thread when it ends: a join that a signal interrupts would report it as stopped."""
        self._close_error: Exception | None = None
        """The error of closing."""
        self._upstreams: weakref.WeakSet[FlightUpstream] = weakref.WeakSet()
        self._node: Node | None = None
        with contextlib.ExitStack() as opened:
            node_folder = opened.enter_context(NodeFolder.open(as_folder(config.folder), config.name, env=env))
            node_folder.tickets.seconds = config.ticket_seconds
            self._node_folder = node_folder
            # The server starts first: the lease holds its address, and a free port is known only then.
            host, port = config.listen
            self.server = opened.enter_context(
                FlightNode(
                    self,
                    host=host,
                    port=port,
                    security=config.server,
                    limits=config.server_limits,
                    insecure=config.insecure,
                    heartbeat_seconds=min(_LONGEST_HEARTBEAT, config.poll_seconds),
                    is_member=lambda name: name in self._addresses(),
                    env=env,
                )
            )
            self.url = config.url or self.server.url
            """The address for other nodes, and for ``sl.node.RemoteLog``."""
            self._lease: Lease | None = None
            if config.lease is not None:
                holder = f"{config.name} {self.url}"
                self._lease = Lease(open_store(config.lease), LEASE, holder, seconds=config.lease_seconds, env=env)
            node = opened.enter_context(
                Node(
                    node_folder,
                    replace(config, url=self.url),
                    connect=self._reach,
                    lease=self._lease,
                    upstream=config.upstream,
                    create=config.create,
                    take_over=None if config.take_over is None else as_folder(config.take_over),
                    lead=config.lead,
                    open_cold=lambda url, log_id: NodeColdTier(
                        open_store(url, config.tiering.options), log_id, config.tiering, env=env
                    ),
                    stop=self._stop,
                )
            )
            opened.pop_all()
        self._node = node
        self._metrics = show_metrics(node, self._lease)
        self._origin = Origin(f"The node {config.name}", self)
        self._tiered = threading.Event()
        """Set when the thread that tiers has ended."""
        self._thread = threading.Thread(target=self._run, name=f"strandline-node-{config.name}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._tier, name=f"strandline-tier-{config.name}", daemon=True).start()

    def _reach(self, url: str) -> Upstream:
        self.config.check_reaching(url, self._addresses())
        upstream = FlightUpstream(url, security=self._security(), timeout=self.config.timeout, env=self._env)
        self._upstreams.add(upstream)
        if self._stop.is_set():  # opened while the other connections were closed
            upstream.close()
        return upstream

    def _addresses(self) -> dict[str, str]:
        """The nodes of the log with their addresses: those that were recorded, or the settings."""
        return addresses(self._node_folder.state.membership, self.config.nodes)

    def _security(self) -> ClientSecurity:
        """The node's own certificate and token, as their files have them now."""
        if self._client.reread is not None:
            try:
                self._client = self._client.reread()
            except StrandlineError as error:
                _LOGGER.warning("Node %s connects with its former certificate and token: %s", self.config.name, error)
        return self._client

    def _tier(self) -> None:
        """Rounds of tiering while the node leads; a copy that is interrupted ends before any of it is stored."""

        def made(*, sweep: bool) -> bool:
            done = self.node.tier(sweep=sweep, stop=self._stop)
            self.node.tiering_trouble = None
            return done is not None

        def failed(error: StrandlineError) -> None:
            # A primary that has just begun, or has just lost its lease, is not worth a warning.
            if str(error) != self.node.tiering_trouble:
                level = logging.INFO if isinstance(error, NotReady) else logging.WARNING
                _LOGGER.log(level, "A round of tiering failed, and is repeated: %s", error)
            self.node.tiering_trouble = str(error)

        try:
            run_rounds(made, failed, self._stop, pause=self.config.tiering.pause, clock=self._env.clock)
        except Exception:  # a bug: without the thread nothing is tiered or trimmed, but the log can still be used
            _LOGGER.exception("Node %s has stopped tiering. Start it again.", self.config.name)
            raise
        finally:
            self._tiered.set()

    # --- control thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._step_until_stopped()
            if self._stop.is_set():  # a failed node can be read until it is closed
                self._tiered.wait(_CLOSE_SECONDS)  # a round that the store holds up ends later, with LogClosed
                self._release()
        finally:
            self._ended.set()

    def _on_control_thread(self, call: Callable[[], T]) -> T:
        """Let the control thread make a call between two steps; returns its result, or raises its error.

        ``NotReady`` if that thread has ended. Only it changes roles: no other thread closes a feed that it reads.
        """
        result: Future[T] = Future()
        with self._requesting:
            if self._why_ended is not None:
                raise NotReady(self._why_ended)
            self._requests.append((result, call))
        self._wake.set()
        return result.result()

    def _make_requested_calls(self) -> None:
        while self._requests:
            result, call = self._requests.popleft()
            try:
                result.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
                result.set_exception(error)

    def _step_until_stopped(self) -> None:
        """Step the node until it is stopped, or fails."""
        name = self.config.name
        why = f"{name} has stopped."
        try:
            while True:
                self._wake.clear()  # first: whoever sets it from here on is seen, or wakes the thread
                if self._stop.is_set():
                    break
                self._make_requested_calls()
                pause = self.node.step()
                if pause > 0:
                    self._env.clock.wait(self._wake, pause)
        except BaseException as error:
            why = f"{name} has failed ({error!r}): look at its log, and start it again."
            _LOGGER.exception("Node %s failed, and steps down. Start it again.", name)
            self.node.failure = error
            self._step_down()
        finally:
            with self._requesting:
                self._why_ended = why
            for result, _ in self._requests:
                result.set_exception(NotReady(why))

    def _step_down(self) -> None:
        """Release the leadership, and nothing else: a failed node may be in any state."""
        if self.node.is_primary:
            self.node.primary.step_down("it failed")
        if self._lease is not None:
            self._lease.release()

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The node itself; ``NotReady`` while it is starting. Only the control thread may step it."""
        if self._node is None:
            raise NotReady(f"{self.name} is starting: ask again a little later.")
        return self._node

    @property
    def condition(self) -> str:
        """The node's state: leading, connecting, bootstrapping, following, fenced, gap, diverged or failed."""
        return self.node.condition

    @property
    def trouble(self) -> str | None:
        """Why it has stopped until an operator acts, or None."""
        return self.node.trouble

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the control thread, or None."""
        return None if self._node is None else self._node.failure

    def why_not_ready(self) -> str | None:
        """Why it cannot serve now; None if it leads or follows, and knows the commit watermark."""
        if self._stop.is_set():
            return "it is stopping"
        if self.condition not in (Condition.LEADING, Condition.FOLLOWING):
            return f"it is {self.condition}" if self.trouble is None else f"it is {self.condition}: {self.trouble}"
        return None if self.node.knows_committed else "it does not know yet what is committed"

    @property
    def content_type(self) -> str | None:
        """The media type of the values, as recorded when the log was created; None: unspecified."""
        return self.node.log.content_type

    def wait_until(self, condition: Callable[[], bool], timeout: Timeout) -> bool:
        """Block until a condition holds (True), or until the timeout, a failure or the close (False)."""
        deadline = self._env.clock.monotonic() + timeout
        while not condition():
            if self._env.clock.monotonic() >= deadline or self.failure is not None or self._stop.is_set():
                return condition()
            self._env.clock.sleep(_LOOK)
        return True

    def status(self) -> NodeStatus:
        """Role, position and health."""
        return self.node.status()

    def promote(self, *, force: bool = False) -> RunningNode:
        """Become the primary if that loses nothing committed; returns the node.

        With a lease, waits until the former primary's lease has expired. ``NotReady`` with the reason if it must not
        lead; ``force`` ignores the nodes that cannot be reached, and loses the records that only they have.
        """
        node = self.node
        self._on_control_thread(lambda: node.promote(force=force))
        return self

    def rebootstrap(self) -> None:
        """Build the copy again from a snapshot of the primary. The current copy serves reads until then."""
        self._on_control_thread(self.node.rebootstrap)

    # --- as a log ----------------------------------------------------------------------------------------------

    def reading(self) -> Log:
        """The log as clients see it: up to the commit watermark, through changes of the node's role.

        ``NotReady`` while the node does not know the watermark: after it was killed, or has just become the primary.
        """
        return self.node.reading()

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self.node.reading().log_id

    def bounds(self) -> Bounds:
        """The first retained offset, and the next one that readers will see."""
        return self.node.reading().bounds()

    def end(self) -> Cursor:
        """The cursor at the end that readers see now."""
        return self.node.reading().end()

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at ``offset``."""
        return self.node.reading().cursor_at(offset)

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset."""
        return self.node.hot.append_at(offset)  # segments do not distinguish batches

    def position_of(self, start: Start) -> int:
        """The offset of a start; whether it is retained is not checked."""
        return self.node.reading().position_of(start)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[Span]:
        """The spans after a cursor, up to what is committed; processes on the same disk can fetch them."""
        return self.node.reading().plan(since, limit)

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, as every log reads them."""
        return self.node.reading().read(since, upto=upto, columns=columns)

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until there is a record to read past the cursor (True), or until the timeout (False)."""
        return self.node.reading().wait(past, timeout)

    @property
    def slots(self) -> Slots:
        """The slots of consumers, which the primary has; ``NotReady`` on a node that does not lead."""
        return self.node.slots

    # --- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the node and its server, release the folder and the lease at once. Idempotent.

        If it is interrupted, the node finishes closing by itself, or is unchanged; closing again waits for that.
        """
        self._stop.set()
        self._wake.set()
        if not self._ended.wait(_CLOSE_SECONDS):
            # A call to another node or a bootstrap ends once its connection is closed.
            for upstream in list(self._upstreams):
                upstream.close()
            self._ended.wait()
        self._release()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _release(self) -> None:
        """Close everything, once. The control thread calls this: no signal interrupts it."""
        with self._closing:
            if self._closed:
                return
            self._metrics.close()
            try:
                with contextlib.ExitStack() as closing:  # closes the rest if one fails
                    if self._lease is not None:
                        closing.callback(self._lease.release)
                    closing.callback(self.node.close)
                    self.server.close()
            except Exception as error:  # noqa: BLE001 - raised by close()
                self._close_error = error
            self._closed = True
