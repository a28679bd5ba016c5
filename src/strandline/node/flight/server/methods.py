"""Methods of Arrow Flight on a node: small calls, streams of records, appends, and the streams of replicas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.flight as fl

from strandline.errors import InvalidInput, NotReady, Overloaded
from strandline.formats.node.ticket import (
    FeedTicket,
    FileTicket,
    ReadTicket,
    ReportTicket,
    decode_ticket,
    encode_ticket,
)
from strandline.formats.node.wire import decode_advance, encode_answer
from strandline.model.node import NO_HEARTBEAT
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.security import APPENDERS, EVERYBODY
from strandline.node.flight.server.actions import ACTIONS, NodeService, act, seal_of, wait_of
from strandline.node.flight.server.admission import Admission, AdmittedCall
from strandline.node.flight.server.limits import MemoryBudget
from strandline.node.flight.server.transport import CallCancelled, GrpcCall
from strandline.node.flight.wire.append_stream import collect, read_command
from strandline.node.flight.wire.errors import Code, refusal_of
from strandline.node.flight.wire.protocol import (
    check_request,
    read_flight_data,
    write_action_type,
    write_flight_data,
    write_put_result,
)
from strandline.node.flight.wire.streams import (
    CHUNK_SCHEMA,
    TURN,
    Wanted,
    feeding,
    pieces,
    reading,
    schema_of_columns,
)
from strandline.node.message_json import write_commit
from strandline.node.messages import SEAL, WAIT, Caller, ReplicaProgress
from strandline.storage.env import Env
from strandline.storage.metrics import CALLS

_MEMORY_SECONDS: Final = 2.0
"""Seconds that a reader waits for memory that other readers hold."""

_OUTCOMES: Final = {
    Code.UNAUTHENTICATED: "unauthenticated",
    Code.PERMISSION_DENIED: "denied",
    Code.UNAVAILABLE: "not_ready",
    Code.UNKNOWN: "failed",
}
"""Outcomes of calls that were refused, in the metrics."""


@final
class FlightMethods:
    """Methods of Arrow Flight on a node. Each takes an admitted call, and yields the messages of its answer."""

    def __init__(
        self,
        served: NodeService,
        admission: Admission,
        *,
        stop: threading.Event,
        heartbeat_seconds: float,
        env: Env,
    ) -> None:
        self._served = served
        self._admission = admission
        self._limits = limits = admission.limits
        self._appended = MemoryBudget("appends", limits.memory_bytes, limits.memory_bytes_each)
        self._read = MemoryBudget("what is read", limits.reading_bytes, limits.reading_bytes_each)
        self._fed = MemoryBudget("feeds", limits.reading_bytes, limits.reading_bytes_each)
        self._stop = stop
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = env.clock
        self.by_name: Final = {
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
            outcome = "cancelled"
            try:
                with self._admission.enter(call) as admitted:
                    self._refuse_when_stopping()
                    yield from answer(admitted)
                outcome = "ok"
            except CallCancelled:
                return  # the caller is gone
            except Exception as error:  # noqa: BLE001 - sent to the caller
                refusal = refusal_of(error, what)
                outcome = "overloaded" if isinstance(error, Overloaded) else _OUTCOMES[refusal.code]
                call.refuse(refusal)
            finally:
                CALLS.labels(call.method, outcome).inc()

        return serve

    def _wanted(self, admitted: AdmittedCall) -> Wanted:
        def is_live() -> bool:
            self._refuse_when_stopping()
            return admitted.is_wanted

        return Wanted(is_live, self._heartbeat_seconds, self._clock)

    def _refuse_when_stopping(self) -> None:
        if self._stop.is_set():
            raise NotReady("The node is stopping: connect again, or ask another one.")

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
        elif action.type == SEAL:
            self._check_seal(admitted, body)
        for answer in act(self._served, admitted.rights, action.type, body):
            yield fl.Result(pa.py_buffer(answer)).serialize()

    def _wait(self, admitted: AdmittedCall, body: bytes) -> None:
        """Block until there is a record past a cursor, or the time is over."""
        admitted.rights.need(*EVERYBODY)
        past, seconds = wait_of(body)
        log, wanted = self._served.node.reading(), self._wanted(admitted)
        deadline = self._clock.monotonic() + min(seconds, self._limits.wait_seconds)
        self._admission.limiter.wait(admitted.place, admitted.who)
        while wanted.is_live() and (left := deadline - self._clock.monotonic()) > 0:
            if log.wait(past, min(left, TURN)) or log.ended(past.next):
                break
        admitted.place.waits = None

    def _check_seal(self, admitted: AdmittedCall, body: bytes) -> None:
        """Refuse a seal that waits for its policy for longer than an append may, before anything is sealed."""
        admitted.rights.need(*APPENDERS)
        fields, seconds = seal_of(body)
        if seconds > (most := self._limits.append_seconds):
            raise fields.refused(f"it waits for {seconds:g} s, and {most:g} are the most")

    def _list_flights(self, admitted: AdmittedCall) -> Iterator[bytes]:
        admitted.first()
        admitted.named()
        admitted.rights.need(*EVERYBODY)
        yield self._info(None, ReadTicket())

    def _get_flight_info(self, admitted: AdmittedCall) -> Iterator[bytes]:
        descriptor = self._descriptor(admitted)
        yield self._info(descriptor, _asked_for(descriptor))

    def _get_schema(self, admitted: AdmittedCall) -> Iterator[bytes]:
        yield fl.SchemaResult(schema_of_columns(_asked_for(self._descriptor(admitted)).columns)).serialize()

    def _descriptor(self, admitted: AdmittedCall) -> Any:
        message = admitted.first()
        admitted.named()
        admitted.rights.need(*EVERYBODY)
        return fl.FlightDescriptor.deserialize(check_request(message))

    def _info(self, descriptor: Any, ticket: ReadTicket) -> bytes:
        log = self._served.node.reading()
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
        wanted = self._wanted(admitted)
        match decode_ticket(fl.Ticket.deserialize(check_request(admitted.first())).ticket):
            case ReadTicket() as asked:
                admitted.named()
                admitted.rights.need_to_read(asked)
                hold = partial(self._read.waited_for, admitted.who, patience=_MEMORY_SECONDS)
                yield write_flight_data(schema_of_columns(asked.columns).serialize())
                with contextlib.closing(reading(self._served.node.reading(), asked, wanted, hold)) as parts:
                    for message, note in parts:
                        yield write_flight_data(message, metadata=note)
            case FileTicket() as asked:
                caller = _replica(admitted, asked)
                yield write_flight_data(CHUNK_SCHEMA.serialize())
                with contextlib.closing(pieces(self._served.node.primary, asked, caller, wanted.is_live)) as chunks:
                    for chunk in chunks:
                        yield write_flight_data(chunk.serialize())
            case FeedTicket() | ReportTicket():
                admitted.named()
                raise InvalidInput("This ticket is for an exchange: open it with DoExchange.")

    # --- streams in --------------------------------------------------------------------------------------------

    def _do_put(self, admitted: AdmittedCall) -> Iterator[bytes]:
        first = read_flight_data(admitted.first())
        admitted.named()
        admitted.rights.need(*APPENDERS)
        command = read_command(_command(first.descriptor), self._limits)
        with self._appended.held_by(admitted.who) as hold:
            records = collect(first, self._in_time(admitted.receive), self._limits, hold)
            command.check(records)
            commit = self._served.node.primary.append(
                records,
                append=command.append,
                policy=command.policy,
                timeout=command.timeout,
                expect=command.expect,
                seal=command.seal,
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
        hold = partial(self._fed.waited_for, caller.name, patience=_MEMORY_SECONDS)
        self._admission.limiter.feed(admitted.place, caller.name)
        yield write_flight_data(RECORD_SCHEMA.serialize())
        wanted = self._wanted(admitted)
        with contextlib.closing(feeding(self._served.node.primary, asked, caller, wanted, hold)) as parts:
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
                if advance.is_answered:
                    answer = self._served.node.primary.acknowledge(caller, progress)
                    yield write_flight_data(b"", metadata=encode_answer(answer.heartbeat, answer.refused))
                    continue
                refused = self._served.node.primary.acknowledge_nowait(caller, progress)
                if refused is not None:  # which the sender reads as the next answer
                    yield write_flight_data(b"", metadata=encode_answer(NO_HEARTBEAT, refused))


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
