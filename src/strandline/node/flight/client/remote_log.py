"""A replicated log over Arrow Flight, as clients use it: on one of its nodes, or on whichever leads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Final, final
from uuid import UUID

import msgspec
import pyarrow as pa

from strandline.errors import InvalidInput, NotReady, Overloaded, TransientStorageError
from strandline.formats.node.ticket import ReadTicket
from strandline.log.contract import LogReading, cursor_of
from strandline.log.produce.appending import Produces, Shipping, shipping_by
from strandline.log.read.planning import PlanBuilder, cursor_after
from strandline.log.read.reading import HeadPoller
from strandline.log.read.value_format import WithoutFormat
from strandline.log.slots import resume
from strandline.log.writers.numbered import numbered
from strandline.model.addresses import AddressText
from strandline.model.arguments import Duration, Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import StoredAppend, WriterId, WriterState
from strandline.model.node import Membership
from strandline.model.records import RecordSource
from strandline.node.flight.client.channel import TIMEOUT, Channel
from strandline.node.flight.client.node_channels import FAILOVER_TIMEOUT, NodeChannels, ReadFrom
from strandline.node.flight.client.remote_slots import RemoteSlots
from strandline.node.flight.client.remote_span import RemoteSpan, planned_span, resumed_stream, streamed_with_terms
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.wire.append_stream import AppendCommand, as_messages, write_command
from strandline.node.flight.wire.streams import schema_of_columns
from strandline.node.lead.policies import CommitPolicy, as_policy
from strandline.node.members.rules import Change
from strandline.node.members.steps import MembersApi
from strandline.node.message_json import read_commit, read_node_slots, read_status
from strandline.node.messages import SEAL, WAIT, Commit, NodeSlots, NodeStatus, Plan, TimedOut, Topology
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

_ANY_LOG: Final = UUID(int=0)

_LONGEST_WAIT: Final = 10.0
"""Seconds of one waiting call: a node that is gone is noticed in between."""

_FAILED_PAUSE: Final = 0.1


@bound_to_process()
@final
@checked
class RemoteLog(WithoutFormat, Produces, LogReading, MembersApi, Closing):
    """A replicated log: append to it on its primary, and read it anywhere up to what is committed. Safe in threads.

    Satisfies :class:`~strandline.log.contract.Log`. With the addresses of several nodes it finds the one that leads,
    and follows a failover; no answer is older than an earlier one.
    """

    def __init__(
        self,
        url: AddressText,
        *,
        security: ClientSecurity | None = None,
        timeout: Duration = TIMEOUT,
        read_from: ReadFrom = "primary",
        failover_timeout: float = FAILOVER_TIMEOUT,
        env: Env = SYSTEM,
    ) -> None:
        """For the node at ``grpc://host:port``, or for all of ``grpc://host:port,host:port``; connects on first use.

        Args:
            url: The address of a node, or of several nodes of the same log; ``grpc+tls://`` for TLS.
            security: The token, and the certificates.
            timeout: Seconds that a node may take to answer.
            read_from: With several addresses: the ``"primary"``, or ``"replicas"``, which takes load off the primary.
                Either way another node is read while these cannot be.
            failover_timeout: With several addresses: seconds that a call waits while no node can serve it.
            env: Clock and chance, for tests.
        """
        self._nodes = NodeChannels(
            url, security=security, timeout=timeout, failover_timeout=failover_timeout, read_from=read_from, env=env
        )
        self._env = env
        self._waiter = HeadPoller()
        self._has_looked = False
        """Whether a node has said if the log was sealed."""
        self._origin = Origin(f"The remote log {url}", self)

    @property
    def url(self) -> str:
        """The address, or addresses, as given."""
        return self._nodes.url

    @property
    def security(self) -> ClientSecurity | None:
        """The credentials with which it authenticates itself."""
        return self._nodes.security

    def __repr__(self) -> str:
        return f"RemoteLog({self._nodes.url!r})"

    # --- appending ---------------------------------------------------------------------------------------------

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId | None = None,
        number: int | None = None,
        expect: int | None = None,
        seal: bool = False,
        policy: str | CommitPolicy | None = None,
        timeout: float = 5.0,
    ) -> Commit:
        """Append a batch, whole or not at all, and wait up to ``timeout`` seconds for its policy.

        The same writer and number again is a no-op. With ``expect``, ``ExpectationFailed`` unless the log ends exactly
        there. ``TransientStorageError`` if no answer came: the records may be appended or not, and only a numbered
        append can be repeated safely. With several addresses this call repeats it, for up to ``failover_timeout``
        seconds, at whichever node leads.
        """
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        append = numbered(writer, number)
        command = write_command(AppendCommand(append, as_policy(policy), timeout, expect, table.num_rows, seal))
        tries = 0  # calls that may have appended the batch

        def put(channel: Channel) -> Commit:
            nonlocal tries
            tries += 1
            try:
                found = channel.put(command, as_messages(table), table.schema, timeout + channel.timeout)
            except NotReady:
                tries -= 1
                raise
            commit = read_commit(found)
            return replace(commit, repeated=commit.repeated and tries == 1)

        commit = self._nodes.on_primary(put, may_repeat=append is not None)
        if not isinstance(commit.outcome, TimedOut):
            self._nodes.show(0, commit.bookmark.next)  # reads then skip a replica that does not have it yet
        return commit

    def seal(self, *, timeout: float = 5.0) -> Cursor:
        """Durably end the log under its commit policy, and return the cursor of its end; safe to repeat.

        ``CommitTimedOut`` if the policy is not satisfied in time: sealing it again waits again.
        """

        def ask(channel: Channel) -> Cursor:
            return channel.ask(SEAL, timeout=timeout + channel.timeout, seconds=timeout).cursor("cursor")

        end = self._nodes.on_primary(ask, may_repeat=True)
        self._nodes.show_seal(end.next)
        return end

    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        return shipping_by(self.append, writer, self.last_number, env=self._env)

    def last_number(self, writer: WriterId) -> int | None:
        """The number of the writer's last append, as the primary knows; None if it does not know the writer."""
        return self._nodes.ask_primary("last-number", may_repeat=True, writer=writer).maybe_natural("number")

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer, or of a source of ingested records; None if the primary does not know it."""
        found = self._nodes.ask_primary("last-append", may_repeat=True, writer=writer)
        return found.record(WriterState, proof=found.maybe_proof("proof")) if "number" in found else None

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset; ``CursorExpired`` if it is not retained."""
        found = self._nodes.ask_reader("append-at", offset=offset)[0]
        first, following = found.natural("first"), found.natural("next")
        if found.maybe_natural("number") is None:
            return StoredAppend(first, following, None)
        return StoredAppend(first, following, (WriterId(found.uuid("writer")), found.natural("number")))

    # --- reading -----------------------------------------------------------------------------------------------

    def read(
        self,
        since: Start | None = None,
        *,
        follow: bool = False,
        upto: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``. With
        ``follow`` the stream has no end. Raises as the node does, ``TransientStorageError`` if the connection broke:
        continue behind the last offset. With several addresses the stream continues by itself.
        """
        schema = schema_of_columns(columns)
        cursor = None if since is None else cursor_of(self, since)
        ticket = ReadTicket(cursor, upto, follow, None if columns is None else tuple(columns))
        if self._nodes.is_one:
            return (batch for batch, _ in streamed_with_terms(self._nodes.all[0], ticket, schema, self._env))
        return self._read_anywhere(ticket)

    def _read_anywhere(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        if ticket.since is None:
            log_id, bounds = self._look()
            cursor, following = Cursor(log_id, bounds.first), bounds.next
        else:
            end = self.end()
            log_id, cursor, following = end.log_id, ticket.since, end.next
        upto = ticket.upto if ticket.follow or ticket.upto is not None else following
        if upto is not None and not ticket.follow and upto > following:
            raise NotReady(f"The log does not reach offset {upto} yet; it ends at {following}.")
        if upto is not None and cursor.next >= upto:
            self.plan(cursor, Limit(batches=1))  # nothing to read, but a cursor of another log is refused
        yield from resumed_stream(self._nodes, log_id, cursor, replace(ticket, upto=upto), self._env)

    def bounds(self) -> Bounds:
        """The first retained and the next offset that readers see."""
        return self._look()[1]

    def _look(self) -> tuple[UUID, Bounds]:
        fields, _ = self._nodes.ask_reader("bounds", end="next")
        self._has_looked = True
        bounds = Bounds(fields.natural("first"), fields.natural("next"), fields.flag("sealed"))
        return (log_id := fields.uuid("log_id")), self._nodes.shown(log_id, bounds)

    def ended(self, at: int) -> bool:
        """Whether the log was sealed at an offset or below, as of the last look at it; looks only if none was taken."""
        if self._nodes.seal is None and not self._has_looked:
            self._look()
        return self._nodes.seal is not None and at >= self._nodes.seal

    @property
    def content_type(self) -> str | None:
        """The media type of the values, as recorded when the log was created; None: unspecified."""
        fields, _ = self._nodes.ask_reader("bounds", end="next")
        return fields.maybe_text("content_type")

    @property
    def log_id(self) -> UUID:
        """The log's identity; asks the node once."""
        known = self._nodes.log_id
        return self.end().log_id if known is None else known

    def end(self) -> Cursor:
        """The cursor at the end that readers see now."""
        # Not by its bounds: a node knows its end also while it does not know where the cold tier begins.
        found, _ = self._nodes.ask_reader("cursor-at", offset=0)
        log_id, end = found.cursor("cursor").log_id, found.maybe_natural("end")
        if end is None:  # a node of an earlier version
            log_id, bounds = self._look()
            return Cursor(log_id, bounds.next)
        self._nodes.identify(log_id)
        return Cursor(log_id, end)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at ``offset``, with term and fingerprint as far as the node still holds the record before it."""
        found, _ = self._nodes.ask_reader("cursor-at", offset=offset)
        cursor, end = found.cursor("cursor"), found.maybe_natural("end")
        # The record before it may yet be replaced by another one, as long as it is not committed.
        return Cursor(cursor.log_id, offset) if end is not None and end < offset else cursor

    def position_of(self, start: Start) -> int:
        """The offset of a start; whether it is retained is not checked."""
        if start == "retained" or isinstance(start, datetime):
            log_id, bounds = self._look()
        elif isinstance(start, str | Cursor) and start != "beginning":
            end = self.end()
            log_id, bounds = end.log_id, Bounds(0, end.next)
        else:  # it does not depend on the log: no request
            log_id, bounds = _ANY_LOG, Bounds(0, 0)
        offset_at = lambda time: self._nodes.ask_reader("offset-at", time=time)[0].natural("offset")  # noqa: E731
        return resume.position_of(start, log_id, bounds, offset_at)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[RemoteSpan]:
        """The spans after a cursor, in order and without a hole; any process can fetch them from the node."""
        planned: PlanBuilder[RemoteSpan] = PlanBuilder(limit)
        while True:
            found, channel = self._nodes.ask_reader("plan", since=since, **asdict(planned.rest))
            plan = found.record(Plan)
            urls: tuple[str, ...] = (channel.url,)  # first that of the node that planned it
            if not self._nodes.is_one:
                urls = tuple(dict.fromkeys((*urls, *self._nodes.reading_urls())))
            spans = [planned_span(since.log_id, row, urls, plan.ticket, self._nodes) for row in plan.spans]
            if not planned.add(spans) or planned.is_full or plan.is_whole or not spans:
                return planned.spans
            since = cursor_after(since, spans[-1])

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until there is a record to read past the cursor (True), or until the timeout (False).

        A call to the node waits there. If it has too many of those, or is of an earlier version, this polls.
        """
        clock = self._env.clock
        deadline = clock.monotonic() + timeout
        while True:
            if not self._nodes.is_one and self._nodes.end > past.next:
                return True  # known already: a lagging node must not contradict it
            if self._nodes.seal is not None and past.next >= self._nodes.seal:
                return False
            longest = min(max(0.0, deadline - clock.monotonic()), _LONGEST_WAIT)
            patience = longest + self._nodes.timeout
            try:
                found, _ = self._nodes.ask_reader(
                    WAIT, end="next", waits=False, timeout=patience, past=past, seconds=longest
                )
                if (end := found.natural("next")) > past.next:
                    return True
                self._has_looked = True
                if found.flag("sealed"):
                    self._nodes.show_seal(end)
            except (Overloaded, InvalidInput):
                return self._waiter.wait(self.bounds, past, deadline - clock.monotonic(), clock)
            except (NotReady, TransientStorageError):
                if self._nodes.is_one:
                    raise
                clock.sleep(min(_FAILED_PAUSE, max(0.0, deadline - clock.monotonic())))
            if clock.monotonic() >= deadline:
                return False

    @property
    def slots(self) -> RemoteSlots:
        """The slots of consumers, which the primary has; ``NotReady`` on a node that does not lead."""
        return RemoteSlots(self._nodes)

    # --- administration ----------------------------------------------------------------------------------------

    def topology(self) -> Topology:
        """The replicas of the log with their offsets."""
        return self._nodes.ask_primary("topology", may_repeat=True).record(Topology)

    def slot_lags(self) -> NodeSlots:
        """All slots of the primary, also those of replicas: what each pins, in records, bytes and seconds."""
        return read_node_slots(self._nodes.ask_primary("slot-lags", may_repeat=True))

    def status(self) -> NodeStatus:
        """Role, position and health of this node; with several addresses, of the one that leads."""
        return read_status(self._nodes.ask_primary("status", may_repeat=True))

    def promote(self, *, force: bool = False, timeout: float = 60.0) -> Topology:
        """Make this node the primary, if nothing committed can be lost by that. Takes the address of one node."""
        return self._nodes.only("A promotion").ask("promote", timeout=timeout, force=force).record(Topology)

    def rebootstrap(self) -> None:
        """Tell this node, a replica, to rebuild its copy of the log. Takes the address of one node."""
        self._nodes.only("A bootstrap").call("rebootstrap")

    def unregister(self, replica: str, *, keep_slot: bool = False) -> None:
        """Tell the primary to unregister a replica; ``NotFound`` for an unknown one."""
        self._nodes.ask_primary("unregister", name=replica, term=0, keep_slot=keep_slot)

    def change_members(self, change: Change, *, force: bool = False) -> Membership:
        """Tell the primary to begin a change of the members; returns the record that is in force then."""
        fields = msgspec.to_builtins(change) | {"force": force}
        return self._nodes.ask_primary("change-members", **fields).record(Membership)

    def rotate_keys(self) -> None:
        """Tell the primary to make a new key for tickets; tickets of former keys end with their lifetime."""
        self._nodes.ask_primary("rotate-keys", may_repeat=True)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._nodes.close()
