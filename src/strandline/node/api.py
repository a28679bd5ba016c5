"""The public API of a node in this process: ``Primary`` and ``Replica``, which are logs."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

import pyarrow as pa

from strandline.errors import NotReady, Unsupported
from strandline.log.contract import Handle, Log
from strandline.log.produce.appending import Produces, Shipping, shipping_by
from strandline.log.writers.numbered import numbered
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import Receipt, WriterId, WriterState
from strandline.model.node import Membership
from strandline.model.records import RecordSource, values_bytes
from strandline.node.config import NodeConfig, with_settings
from strandline.node.lead.commit_watermark import CommitHandle
from strandline.node.lead.policies import CommitPolicy, as_policy
from strandline.node.lead.primary import COMMIT_SECONDS, PrimaryRole
from strandline.node.members.rules import Change
from strandline.node.members.steps import MembersApi
from strandline.node.messages import Caller, Commit, NodeSlots, Resume, Topology
from strandline.node.replicate.replica import Condition
from strandline.node.running import RunningNode

_LEADS_WITHIN: Final = 30.0


@final
@checked
class Primary(RunningNode, Produces, MembersApi):
    """A log on this machine that replicas follow: a committed record survives the losses that its policy allows.

    An append is durable here when it returns, and says whether its commit policy is satisfied. Safe in threads.

    >>> import tempfile
    >>> with Primary.open(tempfile.mkdtemp() + "/orders", policy="local") as primary:
    ...     commit = primary.append_values([b"order 1 is new", b"order 2 is new"])
    ...     commit.ensure(), commit.outcome, primary.committed
    (Receipt(first=0, count=2), NotRequired(), 2)
    """

    @classmethod
    @with_settings(NodeConfig)
    def open(
        cls,
        folder: Address,
        *,
        name: str = "primary",
        lease: str | None = None,
        create: bool = True,
        timeout: float = _LEADS_WITHIN,
        **settings: Any,
    ) -> Primary:
        """Open the node in this folder, and wait up to ``timeout`` seconds until it leads.

        Without a ``lease`` it leads by configuration: another node may be promoted at the same time. With one it leads
        once it holds the lease: at once if the log is new or the node was closed, after the lease has expired if it was
        killed. ``NotReady`` if another node leads, or has led since.

        A new node begins with an empty log, or with a copy of the write-ahead log in the folder ``take_over``: the same
        log, with its records, writers and slots. Nobody writes the original any more. Further ``settings`` are the
        fields of :class:`~strandline.node.config.NodeConfig`: ``policy``, ``retention``, ``nodes``, ``listen``, ….
        """
        leads = lease is None
        primary = cls(NodeConfig(folder, name=name, lease=lease, lead=leads, create=create, **settings))
        try:
            primary._wait_to_lead(timeout)
        except BaseException:
            primary.close()
            raise
        return primary

    def _wait_to_lead(self, timeout: float) -> None:
        """Wait until the node leads; ``NotReady``, with the reason, if it does not in time."""
        node = self.node
        if self.wait_until(lambda: node.is_primary or node.condition == Condition.FOLLOWING, timeout):
            if node.is_primary:
                return
            leads = node.node_folder.state.primary
            raise NotReady(f"{self.name} is a replica of {leads}, which leads: open it as a replica, or promote it.")
        why = (
            node.trouble
            or node.why_not_leading
            or "another node holds the lease, or led last; find that node, or open this one as a replica and promote it"
        )
        raise NotReady(f"{self.name} does not lead after {timeout:g} s ({node.condition}): {why}.")

    @property
    def _role(self) -> PrimaryRole:
        return self.node.primary

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId | None = None,
        number: int | None = None,
        expect: int | None = None,
        seal: bool = False,
        policy: str | CommitPolicy | None = None,
        timeout: float = COMMIT_SECONDS,
    ) -> Commit:
        """Append a batch, whole or not at all, and wait for the policy; the commit says if that was reached in time.

        ``commit.ensure()`` raises after a time-out. A read after ``commit.bookmark`` sees the records on any node. A
        ``policy`` may ask for more than the node's own, never for less. The same ``writer`` and ``number`` again is a
        no-op. With ``expect``, ``ExpectationFailed`` unless the log ends exactly there. ``Fenced`` if this node does
        not lead any more: the records may be lost then. ``Overloaded`` while replicas are further behind than the flow
        limits allow. With ``seal`` the log ends with the batch: the policy then counts for both.
        """
        return self._role.append(
            batch, append=numbered(writer, number), policy=as_policy(policy), timeout=timeout, expect=expect, seal=seal
        )

    def seal(self, *, timeout: float = COMMIT_SECONDS) -> Cursor:
        """Durably end the log under its commit policy, and return the cursor of its end. Idempotent.

        ``CommitTimedOut`` if the policy is not satisfied in time: nothing is appended here from then on, and sealing it
        again waits again. ``Fenced`` if this node does not lead any more.
        """
        return self._role.seal(timeout=timeout)

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer, or of a source of ingested records; None if the log does not know it."""
        return self._role.last_append(writer)

    def append_values(
        self, values: Sequence[bytes], *, policy: str | CommitPolicy | None = None, timeout: float = COMMIT_SECONDS
    ) -> Commit:
        """Append records that have a value only, all or none."""
        column = pa.array(values_bytes(values), pa.binary())
        return self.append(pa.table({"value": column}), policy=policy, timeout=timeout)

    def submit(
        self,
        batch: RecordSource,
        *,
        writer: WriterId | None = None,
        number: int | None = None,
        policy: str | CommitPolicy | None = None,
    ) -> CommitHandle:
        """Append without waiting. ``handle.result(timeout)`` waits, and returns the commit."""
        return self._role.submit(batch, append=numbered(writer, number), policy=as_policy(policy))

    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        def append(batch: pa.Table, *, writer: WriterId, number: int, expect: int | None = None) -> Handle:
            return _Submitted(self._role.submit(batch, append=(writer, number), expect=expect))

        return shipping_by(append, writer, self._role.last_number, env=self._env)

    def register_replica(self, replica: str, region: str | None = None) -> int | None:
        """Register a replica, and retain everything from now on for it; returns the position of its slot.

        None if the slot is invalid: the replica has to bootstrap then. Repeating it only changes the region, if one is
        given, and when it was last seen.
        """
        return self._role.register(Caller(replica), region=region).position

    def unregister_replica(self, replica: str, *, keep_slot: bool = False) -> None:
        """Unregister a replica, and drop its slot unless ``keep_slot``; ``NotFound`` for an unknown one.

        It can read no longer than a ticket is valid: the log's key for tickets is rotated.
        """
        self._role.unregister(Caller(replica), keep_slot=keep_slot)

    def change_members(self, change: Change, *, force: bool = False) -> Membership:
        """Begin a change of the log's members, without waiting; returns the record that is in force then."""
        return self._role.change_members(change, force=force)

    def rotate_keys(self) -> None:
        """Make a new key for tickets. Tickets of the former keys end with their lifetime, an hour by default."""
        self._role.rotate_keys()

    def plan_resume(self, replica: str, since: Cursor | None) -> Resume:
        """How a replica would resume from its own position (None for a new replica), whatever its slot says.

        ``PartialResync`` if that position is retained and belongs to this log, ``Rewind`` if the two logs diverged
        before it, otherwise ``FullRebootstrap`` with its cause; ``Diverged`` if the replica has records that this log
        never had. Read-only: no replica is registered, and no slot changes.
        """
        return self._role.plan_resume(replica, since)

    def commit_watermark(self, count: int) -> int:
        """The offset below which everything is durable on at least ``count`` replicas."""
        return self._role.commit_watermark(count)

    @property
    def committed(self) -> int:
        """The commit watermark: everything below satisfies the node's policy, and readers see it."""
        return self._role.committed

    def topology(self) -> Topology:
        """The replicas of the log with their offsets."""
        role = self._role
        return role.topology(Caller(self.name, role.term))

    def slot_lags(self) -> NodeSlots:
        """All slots, of consumers, replicas and the tierer: what each pins, in records, bytes and seconds."""
        return self._role.slot_lags()

    def trim(self, upto: int) -> int:
        """Delete records below an offset, but none that a slot needs; returns the new first offset."""
        return self._role.trim(upto)


@final
@checked
class Replica(RunningNode):
    """A copy of a primary's log on this machine: what it has acknowledged to the primary is durable here.

    It connects, bootstraps if it has to, and follows. It recovers from everything except a gap or a divergence, which
    :attr:`condition` and :attr:`trouble` show. Safe in threads.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> primary = Primary.open(folder + "/a", name="a")
    >>> replica = Replica.open(folder + "/b", primary.url, name="b")
    >>> commit = primary.append_values([b"order 1 is new"])
    >>> log = replica.reading(after=commit.bookmark, timeout=10)
    >>> [batch.column("value").to_pylist() for batch in log.read()]
    [[b'order 1 is new']]
    >>> replica.close(), primary.close()
    (None, None)
    """

    @classmethod
    @with_settings(NodeConfig)
    def open(
        cls,
        folder: Address,
        upstream: str | None = None,
        *,
        name: str = "replica",
        **settings: Any,
    ) -> Replica:
        """Open the node in this folder as a replica of ``upstream`` (``grpc://host:port``), or of the ``lease`` holder.

        Returns at once; the replica retries a primary that it cannot reach. Further ``settings`` are the fields of
        :class:`~strandline.node.config.NodeConfig`, as for :meth:`Primary.open`; ``policy``, ``retention`` and
        ``nodes`` apply once it is promoted.
        """
        return cls(NodeConfig(folder, upstream, name=name, **settings))

    def append(
        self, batch: RecordSource, *, writer: WriterId | None = None, number: int | None = None, **options: object
    ) -> NoReturn:
        """``Unsupported``: only the primary orders records."""
        raise Unsupported(f"{self.name} is a replica, and only the primary of a log appends to it: append there.")

    def seal(self) -> NoReturn:
        """``Unsupported``: only the primary orders records."""
        raise Unsupported(f"{self.name} is a replica, and only the primary of a log seals it: seal it there.")

    def producer(self, *, writer: WriterId | None = None, **options: object) -> NoReturn:
        """``Unsupported``: only the primary orders records."""
        raise Unsupported(f"{self.name} is a replica, and only the primary of a log appends to it: produce there.")

    @property
    def position(self) -> Cursor | None:
        """The cursor behind everything durable here. None before its first bootstrap."""
        return self.node.position

    @property
    def committed(self) -> int:
        """The commit watermark: everything below is here, and satisfies the primary's policy."""
        return self.node.replica.committed

    def reading(self, *, after: Cursor | None = None, max_staleness: float | None = None, timeout: float = 1.0) -> Log:
        """The copy up to the commit watermark. A record that was read is never taken back.

        A replica that was killed first learns the watermark from a primary.

        ``after`` is the bookmark of a commit: waits until that record is here. ``max_staleness`` waits until this
        replica is at most this many seconds behind the primary. ``NotReady`` if that takes longer than ``timeout``;
        ``Diverged`` if the bookmarked record was lost with its primary.
        """
        node = self.node
        began = self._env.clock.monotonic()
        if after is not None or max_staleness is not None:
            # No reads during a bootstrap, but it may end in a moment, as for a replica that has just started.
            self.wait_until(lambda: node.position is not None and self.condition != Condition.BOOTSTRAPPING, timeout)
        if node.position is not None:
            self.wait_until(lambda: node.knows_committed, timeout - (self._env.clock.monotonic() - began))
        timeout = max(0.0, timeout - (self._env.clock.monotonic() - began))
        log = node.reading()
        try:
            replica = node.replica
        except NotReady:  # it was promoted meanwhile
            if after is not None and log.bounds().next < after.next and not log.wait(after.at(after.next - 1), timeout):
                raise NotReady(f"Offset {after.next - 1} is not committed after {timeout:g} s: ask again.") from None
            if after is not None:
                log.plan(after, Limit(batches=1))  # raises if the record before the cursor differs here
            return log
        replica.watermark.readable(after=after, max_staleness=max_staleness, timeout=timeout)
        return log

    def promote(self, *, force: bool = False) -> Primary:
        """As :meth:`RunningNode.promote`; returns the same node as a primary."""
        super().promote(force=force)
        primary = Primary.__new__(Primary)
        primary.__dict__ = self.__dict__  # one node with two faces: either of them closes it
        return primary


@dataclass(frozen=True, slots=True)
class _Submitted:
    """An append of a producer: its result is the receipt, once the commit policy is satisfied."""

    handle: CommitHandle

    @property
    def repeated(self) -> bool:
        return self.handle.repeated

    def done(self) -> bool:
        return self.handle.done()

    def result(self, timeout: float | None = None) -> Receipt:
        return self.handle.result(COMMIT_SECONDS if timeout is None else timeout).ensure()

    def __await__(self) -> Generator[object, None, Receipt]:
        return asyncio.to_thread(self.result).__await__()
