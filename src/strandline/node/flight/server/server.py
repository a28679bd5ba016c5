"""The Arrow Flight server of a node."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.flight as fl

from strandline.errors import InvalidInput, NotReady
from strandline.formats.node.ticket import (
    FeedTicket,
    FileTicket,
    ReadTicket,
    ReportTicket,
    SpanTicket,
    decode_ticket,
    encode_ticket,
)
from strandline.formats.node.wire import decode_advance, encode_answer
from strandline.model.node import NO_HEARTBEAT
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.security import Role, ServerSecurity, check_listening
from strandline.node.flight.server.actions import ACTIONS, act, wait_of
from strandline.node.flight.server.admission import Admission, AdmittedCall
from strandline.node.flight.server.limits import MemoryBudget, ServerLimits, share_heaps
from strandline.node.flight.server.transport import CallCancelled, GrpcCall, GrpcServer, watch
from strandline.node.flight.wire.append_stream import collect, read_command
from strandline.node.flight.wire.errors import refusal_of, stopping
from strandline.node.flight.wire.protocol import (
    SERVICE,
    check_request,
    read_flight_data,
    write_action_type,
    write_flight_data,
    write_put_result,
)
from strandline.node.flight.wire.streams import (
    CHUNK_SCHEMA,
    TURN,
    HeartbeatTimer,
    feeding,
    pieces,
    reading,
    schema_of_columns,
)
from strandline.node.lead.replicas import ReplicaProgress
from strandline.node.message_json import write_commit
from strandline.node.messages import WAIT, Caller
from strandline.node.services import NodeService
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child

_CLOSE_SECONDS: Final = 1.0
"""Seconds that closing waits for streams before it ends them."""

_EXIT_SECONDS: Final = 6.0
_LOOK: Final = 0.01

_MEMORY_SECONDS: Final = 2.0
"""Seconds that a reader waits for memory that other readers hold."""

_EVERYBODY: Final = (Role.CLIENT, Role.REPLICA, Role.ADMIN)


@bound_to_process(keep=("port", "url"))
@final
class FlightNode(Closing):
    """Serves a node over Arrow Flight until it is closed. Does not close the node itself.

    Listens on loopback by default; other machines may connect only with ``security`` that authenticates them, or with
    ``insecure=True``.
    """

    def __init__(
        self,
        served: NodeService,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        security: ServerSecurity | None = None,
        limits: ServerLimits | None = None,
        insecure: bool = False,
        heartbeat_seconds: float = 1.0,
        clock: Clock = CLOCK,
    ) -> None:
        """Start serving; port 0 takes a free one. ``InvalidInput`` for an address that is not safe to listen on.

        ``StorageError`` if the port is taken, or the certificate is invalid.
        """
        security = security or ServerSecurity()
        check_listening(host, security, insecure=insecure)
        self._stop = threading.Event()
        self._host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._scheme = "grpc+tls" if security.is_encrypted else "grpc"
        limits = limits or ServerLimits()
        share_heaps()
        admission = Admission(security, limits, _verifying(served), clock=clock)
        self._limiter = admission.limiter
        service = _Service(served, admission, stop=self._stop, heartbeat_seconds=heartbeat_seconds, clock=clock)
        self._server = GrpcServer(
            self._host, port, SERVICE, service.methods, security=security, limits=limits, clock=clock
        )
        self._watch = watch(self, FlightNode._look)
        self._clock = clock
        _NODES.add(self)
        self._origin = Origin(f"The server {self.url}", self)
        call_in_child(self, _NODES.discard)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"{self._scheme}://{self._host}:{self.port}"

    @property
    def calls(self) -> int:
        """Number of open calls and streams."""
        return self._limiter.inside

    def close(self) -> None:
        """Accept no more calls, and end streams within about a second. Idempotent."""
        self._stop.set()
        self._watch.set()
        ended = self._server.stop(_CLOSE_SECONDS)
        deadline = self._clock.monotonic() + _CLOSE_SECONDS
        while not ended.is_set() and self._limiter.busy and self._clock.monotonic() < deadline:
            ended.wait(_LOOK)

    def _look(self) -> None:
        self._limiter.end_silent()
        self._server.end_stuck()

    def _leave(self) -> None:
        self.close()
        self._server.stop(_CLOSE_SECONDS).wait(_EXIT_SECONDS)


def _verifying(served: NodeService) -> Callable[[str], SpanTicket]:
    def verify(text: str) -> SpanTicket:
        return served.tickets.verify(text)  # looked up per call: a starting node has no tickets yet

    return verify


_NODES: Final[weakref.WeakSet[FlightNode]] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """Give streams time to end: a thread that returns from one during interpreter shutdown aborts the process."""
    for node in list(_NODES):
        node._leave()  # noqa: SLF001 - of the same module


class _Service:
    """Flight's methods. Each takes an admitted call, and yields the messages of its answer."""

    def __init__(
        self,
        served: NodeService,
        admission: Admission,
        *,
        stop: threading.Event,
        heartbeat_seconds: float,
        clock: Clock,
    ) -> None:
        self._served = served
        self._admission = admission
        self._limits = limits = admission.limits
        self._appended = MemoryBudget("appends", limits.memory_bytes, limits.memory_bytes_each)
        self._read = MemoryBudget("what is read", limits.reading_bytes, limits.reading_bytes_each)
        self._fed = MemoryBudget("feeds", limits.reading_bytes, limits.reading_bytes_each)
        self._stop = stop
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self.methods: Final = {
            "ListActions": self._method("Listing actions", self._list_actions),
            "DoAction": self._method("The action", self._do_action),
            "ListFlights": self._method("Listing", self._list_flights),
            "GetFlightInfo": self._method("Describing the log", self._get_flight_info),
            "GetSchema": self._method("Describing the log", self._get_schema),
            "DoGet": self._method("Streaming", self._do_get),
            "DoPut": self._method("The append", self._do_put),
            "DoExchange": self._method("The exchange", self._do_exchange),
        }

    def _method(
        self, what: str, answer: Callable[[AdmittedCall], Iterator[bytes]]
    ) -> Callable[[GrpcCall], Generator[bytes, None, None]]:
        def serve(call: GrpcCall) -> Generator[bytes, None, None]:
            try:
                with self._admission.enter(call) as admitted:
                    self._refuse_when_stopping()
                    yield from answer(admitted)
            except CallCancelled:
                return  # the caller is gone
            except Exception as error:  # noqa: BLE001 - sent to the caller
                call.refuse(refusal_of(error, what))

        return serve

    def _live(self, admitted: AdmittedCall) -> Callable[[], bool]:
        def live() -> bool:
            self._refuse_when_stopping()
            return admitted.is_wanted

        return live

    def _refuse_when_stopping(self) -> None:
        if self._stop.is_set():
            raise stopping()

    # --- small calls -------------------------------------------------------------------------------------------

    def _list_actions(self, admitted: AdmittedCall) -> Iterator[bytes]:
        admitted.first()
        admitted.named()
        for name, action in ACTIONS.items():
            yield write_action_type(name, action.what)

    def _do_action(self, admitted: AdmittedCall) -> Iterator[bytes]:
        action = fl.Action.deserialize(check_request(admitted.first()))
        admitted.named()
        body = action.body.to_pybytes()
        if action.type == WAIT:
            self._wait(admitted, body)
        for answer in act(self._served, admitted.rights, action.type, body):
            yield fl.Result(pa.py_buffer(answer)).serialize()

    def _wait(self, admitted: AdmittedCall, body: bytes) -> None:
        """Block until there is a record past a cursor, or the time is over."""
        admitted.rights.need(*_EVERYBODY)
        past, seconds = wait_of(body)
        log, live = self._served.reading(), self._live(admitted)
        deadline = self._clock.monotonic() + min(seconds, self._limits.wait_seconds)
        with self._admission.limiter.waiting(admitted.who):
            while live() and (left := deadline - self._clock.monotonic()) > 0:
                if log.wait(past, min(left, TURN)):
                    return

    def _list_flights(self, admitted: AdmittedCall) -> Iterator[bytes]:
        admitted.first()
        admitted.named()
        admitted.rights.need(*_EVERYBODY)
        yield self._info(None, ReadTicket())

    def _get_flight_info(self, admitted: AdmittedCall) -> Iterator[bytes]:
        descriptor = self._descriptor(admitted)
        yield self._info(descriptor, _asked_for(descriptor))

    def _get_schema(self, admitted: AdmittedCall) -> Iterator[bytes]:
        yield fl.SchemaResult(schema_of_columns(_asked_for(self._descriptor(admitted)).columns)).serialize()

    def _descriptor(self, admitted: AdmittedCall) -> Any:
        message = admitted.first()
        admitted.named()
        admitted.rights.need(*_EVERYBODY)
        return fl.FlightDescriptor.deserialize(check_request(message))

    def _info(self, descriptor: Any, ticket: ReadTicket) -> bytes:
        log = self._served.reading()
        if descriptor is None:
            descriptor = fl.FlightDescriptor.for_path(str(log.log_id))
        bounds = log.bounds()
        first = bounds.first if ticket.since is None else ticket.since.next
        end = bounds.next if ticket.upto is None else ticket.upto
        records = -1 if ticket.follow else max(0, end - first)
        # No location means: at this server.
        endpoint = fl.FlightEndpoint(encode_ticket(ticket), [])
        info = fl.FlightInfo(schema_of_columns(ticket.columns), descriptor, [endpoint], records, -1)
        data: bytes = info.serialize()
        return data

    # --- streams out -------------------------------------------------------------------------------------------

    def _do_get(self, admitted: AdmittedCall) -> Iterator[bytes]:
        live, timer = self._live(admitted), HeartbeatTimer(self._heartbeat_seconds, self._clock)
        match decode_ticket(fl.Ticket.deserialize(check_request(admitted.first())).ticket):
            case ReadTicket() as asked:
                admitted.named()
                admitted.rights.need_to_read(asked)

                def hold(size: int) -> AbstractContextManager[None]:
                    return self._read.waited_for(admitted.who, size, _MEMORY_SECONDS)

                yield write_flight_data(schema_of_columns(asked.columns).serialize())
                with contextlib.closing(reading(self._served.reading(), asked, live, timer, hold)) as parts:
                    for message, note in parts:
                        yield write_flight_data(message, metadata=note)
            case FileTicket() as asked:
                caller = _replica(admitted, asked)
                yield write_flight_data(CHUNK_SCHEMA.serialize())
                with contextlib.closing(pieces(self._served.primary, asked, caller, live)) as chunks:
                    for chunk in chunks:
                        yield write_flight_data(chunk.serialize())
            case FeedTicket() | ReportTicket():
                admitted.named()
                raise InvalidInput("This ticket is for an exchange: open it with DoExchange.")

    # --- streams in --------------------------------------------------------------------------------------------

    def _do_put(self, admitted: AdmittedCall) -> Iterator[bytes]:
        first = read_flight_data(admitted.first())
        admitted.named()
        admitted.rights.need(Role.CLIENT, Role.ADMIN)
        command = read_command(_command(first.descriptor), self._limits)
        with self._appended.held_by(admitted.who) as hold:
            records = collect(first, self._in_time(admitted.receive), self._limits, hold)
            commit = self._served.primary.append(
                records,
                append=command.append,
                policy=command.policy,
                timeout=command.timeout,
                expect=command.expect,
            )
        yield write_put_result(write_commit(commit))

    def _in_time(self, receive: Callable[[], bytes | None]) -> Callable[[], bytes | None]:
        """Messages of an append, until a deadline: an endless append would hold its memory forever."""
        longest = self._limits.append_seconds
        end = self._clock.monotonic() + longest

        def receive_in_time() -> bytes | None:
            message = receive()
            if self._clock.monotonic() > end:
                raise InvalidInput(f"The append has taken more than {longest:g} s to be sent: append it in parts.")
            return message

        return receive_in_time

    # --- streams of replicas -----------------------------------------------------------------------------------

    def _do_exchange(self, admitted: AdmittedCall) -> Iterator[bytes]:
        match decode_ticket(_command(read_flight_data(admitted.first()).descriptor)):
            case FeedTicket() as asked:
                yield from self._feed(admitted, asked)
            case ReportTicket(name):
                admitted.named(name)
                yield from self._receive_acks(admitted, name)
            case _:
                admitted.named()
                raise InvalidInput("This ticket is for a stream: open it with DoGet.")

    def _feed(self, admitted: AdmittedCall, asked: FeedTicket) -> Iterator[bytes]:
        """Log batches for a replica."""
        caller = _replica(admitted, asked)
        live, timer = self._live(admitted), HeartbeatTimer(self._heartbeat_seconds, self._clock)

        def hold(size: int) -> AbstractContextManager[None]:
            return self._fed.waited_for(caller.name, size, _MEMORY_SECONDS)

        with self._admission.limiter.feeding(caller.name):
            yield write_flight_data(RECORD_SCHEMA.serialize())
            with contextlib.closing(feeding(self._served.primary, asked, caller, live, timer, hold)) as parts:
                for message, note in parts:
                    yield write_flight_data(b"" if message is None else message, metadata=note)

    def _receive_acks(self, admitted: AdmittedCall, name: str) -> Iterator[bytes]:
        """Acknowledgements of one replica over one stream: separate calls cost twice as much."""
        where = f"replica {name!r}"
        admitted.rights.replica(name, 0)  # before it takes memory that is reserved for replicas
        caller = Caller(name, -1)
        with admitted.reporting():
            while (message := admitted.receive_report()) is not None:
                self._refuse_when_stopping()
                report = read_flight_data(message).metadata
                if not report:
                    continue
                advance = decode_advance(bytes(report), where)
                progress = ReplicaProgress(advance.applied, advance.durable, advance.apply_errors, advance.divergences)
                if caller.term != advance.term:
                    caller = admitted.rights.replica(name, advance.term)
                answer = self._answer(caller, progress, is_wanted=advance.is_answered)
                if answer is not None:
                    yield write_flight_data(b"", metadata=answer)

    def _answer(self, caller: Caller, progress: ReplicaProgress, *, is_wanted: bool) -> bytes | None:
        """The answer to an acknowledgement; without ``is_wanted`` only its rejection, which the sender reads next."""
        if is_wanted:
            answer = self._served.primary.acknowledge(caller, progress)
            return encode_answer(answer.heartbeat, answer.refused)
        refused = self._served.primary.acknowledge_nowait(caller, progress)
        return None if refused is None else encode_answer(NO_HEARTBEAT, refused)


def _replica(admitted: AdmittedCall, asked: FeedTicket | FileTicket) -> Caller:
    admitted.named(asked.replica)
    return admitted.rights.replica(asked.replica, asked.term)


def _command(descriptor: bytes | memoryview) -> bytes:
    """The command of a descriptor; nothing if it has none."""
    if not descriptor:
        return b""
    command: bytes | None = fl.FlightDescriptor.deserialize(check_request(descriptor)).command
    return command or b""


def _asked_for(descriptor: Any) -> ReadTicket:
    """The ticket in a descriptor's command; the whole log without one."""
    ticket = decode_ticket(descriptor.command or b"")
    if not isinstance(ticket, ReadTicket):
        raise NotReady("Only tickets for reads have a description: ask for one of those.")
    return ticket
