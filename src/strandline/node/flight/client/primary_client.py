"""A primary over Arrow Flight, as its replicas use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, final

import pyarrow as pa

from strandline.errors import CorruptData, TransientStorageError
from strandline.formats.arrow.header import admit_batch
from strandline.formats.json.fields import Fields
from strandline.formats.node.ticket import FeedTicket, FileTicket, ReportTicket, encode_ticket
from strandline.formats.node.wire import Advance, decode_answer, encode_advance
from strandline.model.cursor import Cursor
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.client.channel import TIMEOUT, Channel, end_exchange
from strandline.node.flight.client.stream_receiver import RemoteFeed
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.wire.errors import node_error, node_errors
from strandline.node.flight.wire.streams import CHUNK_SCHEMA
from strandline.node.message_json import answer, read_handover, read_resume
from strandline.node.messages import (
    Acknowledgement,
    Caller,
    ElectionReport,
    Handover,
    Registration,
    ReplicaProgress,
    Resume,
    SnapshotChunk,
    SnapshotOffer,
    Topology,
)
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

_SNAPSHOT_SECONDS: Final = 300.0
_FETCHED: Final = 64 << 20
"""Bytes of a snapshot's file per call, so that each call can have a deadline."""

_SLOWEST: Final = 1 << 20
"""Lowest accepted rate, in bytes per second."""

_WHAT: Final = "an acknowledgement"


@bound_to_process()
@final
class FlightUpstream(Closing):
    """Another node over Flight. Satisfies :class:`~strandline.node.messages.Upstream`. Safe in threads.

    Connects on first use. Every call ends within ``timeout`` seconds, except sealing a snapshot.
    """

    def __init__(
        self, url: str, *, security: ClientSecurity | None = None, timeout: float = TIMEOUT, env: Env = SYSTEM
    ) -> None:
        """For the node at ``grpc://host:port``; after ``timeout`` seconds without a message a feed counts as lost."""
        self._channel = Channel(url, security=security, timeout=timeout)
        self._env = env
        self._acknowledging = threading.Lock()
        self._acks: _AckStream | None = None
        self._origin = Origin(f"The connection to {url}", self)

    def __repr__(self) -> str:
        return f"FlightUpstream({self._channel.url!r})"

    def _ask(self, action: str, caller: Caller, **fields: Any) -> Fields:
        return self._channel.ask(action, **caller._asdict(), **fields)

    def register(self, caller: Caller, *, region: str | None) -> Registration:
        """Register as a replica."""
        return self._ask("register", caller, region=region).record(Registration)

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """How to resume from the caller's own position."""
        return read_resume(self._ask("resume", caller, since=since))

    def feed(self, caller: Caller, since: Cursor) -> RemoteFeed:
        """The batches from a position on; an error of the request is raised by the first take."""
        ticket = encode_ticket(FeedTicket(caller.name, caller.term, since))
        return RemoteFeed(
            lambda: self._channel.follow(ticket, RECORD_SCHEMA),
            since.next,
            url=self._channel.url,
            silence=self._channel.timeout,
            env=self._env,
        )

    def acknowledge(self, caller: Caller, progress: ReplicaProgress) -> Acknowledgement:
        """Acknowledge on a stream that stays open, which takes less than half of a call's time."""
        answer: Acknowledgement = self._acknowledge(caller, progress, is_answered=True)
        return answer

    def acknowledge_nowait(self, caller: Caller, progress: ReplicaProgress) -> None:
        """Acknowledge without waiting for the answer; a later call raises its error."""
        self._acknowledge(caller, progress, is_answered=False)

    def _acknowledge(self, caller: Caller, progress: ReplicaProgress, *, is_answered: bool) -> Any:
        with self._acknowledging:
            try:
                return self._ack_stream(caller.name).send(caller, progress, is_answered=is_answered)
            except BaseException:
                # A late answer to this acknowledgement must not be taken for the answer to the next.
                self._drop_acks()
                raise

    def _ack_stream(self, name: str) -> _AckStream:
        now = self._env.clock.monotonic()
        if self._acks is None or self._acks.name != name or now >= self._acks.fresh_until:
            self._drop_acks()
            self._acks = _AckStream(self._channel, name, now)
        return self._acks

    def _drop_acks(self) -> None:
        acks, self._acks = self._acks, None
        if acks is not None:
            acks.close()

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log at its end, and seal a snapshot behind that; may take minutes."""
        channel = self._channel
        answers = channel.call("begin-snapshot", timeout=_SNAPSHOT_SECONDS, **caller._asdict(), kind=kind)
        try:
            offer, manifest = answers
        except ValueError as error:
            raise CorruptData(f"{channel.url} did not answer with a snapshot: is it a node of this version?") from error
        return SnapshotOffer(answer(offer, channel.url).name("name"), manifest)

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[SnapshotChunk]:
        """A file of a snapshot from a byte on. The caller stores the bytes, and checks their checksums."""
        timeout = self._channel.timeout + _FETCHED / _SLOWEST
        while True:
            ticket = FileTicket(caller.name, caller.term, snapshot, path, offset, _FETCHED)
            received = 0
            for chunk in self._chunks(encode_ticket(ticket), timeout):
                if chunk.offset != offset + received:
                    raise CorruptData(
                        f"{self._channel.url} sent byte {chunk.offset} of {path!r} where {offset + received} was "
                        "expected."
                    )
                received += len(chunk.data)
                yield chunk
            if received < _FETCHED:
                return
            offset += received

    def _chunks(self, ticket: bytes, timeout: float) -> Iterator[SnapshotChunk]:
        url = self._channel.url
        with node_errors(url, "a file of a snapshot"):
            reader = self._channel.get(ticket, CHUNK_SCHEMA, timeout=timeout)
        try:
            while True:
                try:
                    with node_errors(url, "a file of a snapshot"):
                        chunk = reader.read_chunk()
                except StopIteration:
                    return
                batch = admit_batch(chunk.data, f"A piece of a snapshot of {url}")
                if any(column.null_count for column in batch.columns):
                    raise CorruptData(f"{url} sent a piece of a snapshot without bytes or checksum: ask again.")
                for row in batch.to_pylist():
                    yield SnapshotChunk(**row)
        finally:
            reader.cancel()

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete and durable at this cursor."""
        self._channel.call("end-snapshot", **caller._asdict(), cursor=cursor)

    def topology(self, caller: Caller) -> Topology:
        """The replicas of the log with their offsets."""
        return self._ask("topology", caller).record(Topology)

    def handover(self, caller: Caller, *, membership: tuple[int, int] = (0, 0)) -> Handover:
        """State that a replica needs beside its copy of the log, to become the primary."""
        # Without a record nothing is said: a primary of an earlier version knows no such field.
        known = dict(zip(("members_term", "members_number"), membership, strict=True)) if any(membership) else {}
        return read_handover(self._ask("handover", caller, **known))

    def report(self, caller: Caller) -> ElectionReport:
        """The report of this node for an election, in either role."""
        return self._ask("report", caller).record(ElectionReport)

    def close(self) -> None:
        """Close the connection. Idempotent. Feeds stay open: their openers close them."""
        acks = self._acks
        if acks is not None:
            acks.cancel()  # the thread that waits for an answer holds the lock
        with self._acknowledging:
            self._drop_acks()
        self._channel.close()


class _AckStream:
    """A stream of acknowledgements, and of the answers that they request.

    The deadline is that of the whole stream. It is used for the first half of that time only, so each
    acknowledgement has at least half of the channel's timeout to be answered.
    """

    def __init__(self, channel: Channel, name: str, now: float) -> None:
        self.name = name
        self.fresh_until = now + channel.timeout / 2
        self._url = channel.url
        with node_errors(self._url, _WHAT):
            self._writer, self._reader = channel.exchange(encode_ticket(ReportTicket(name)), channel.timeout)

    def send(self, caller: Caller, progress: ReplicaProgress, *, is_answered: bool) -> Acknowledgement | None:
        """Send an acknowledgement; returns its answer, or that to an earlier one that was rejected.

        None if no answer is requested: then there is one only if it is rejected, for the next to return.
        """
        report = Advance(
            caller.term, progress.applied, progress.durable, progress.apply_errors, progress.divergences, is_answered
        )
        try:
            self._writer.write_metadata(pa.py_buffer(encode_advance(report)))
        except pa.ArrowException as error:
            self._next()  # raises the error with which the node ended the stream
            raise node_error(error, self._url, _WHAT) from error
        if not is_answered:
            return None
        data = self._next().app_metadata
        return Acknowledgement(*decode_answer(None if data is None else data.to_pybytes(), self._url))

    def _next(self) -> Any:
        try:
            return self._reader.read_chunk()
        except StopIteration as error:
            raise TransientStorageError(f"{self._url} answered no acknowledgement: send it again.") from error
        except pa.ArrowException as error:
            raise node_error(error, self._url, _WHAT) from error

    def cancel(self) -> None:
        self._reader.cancel()

    def close(self) -> None:
        end_exchange(self._writer, self._reader)
