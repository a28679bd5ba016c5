"""A node behind an Arrow Flight server."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self, final

import pyarrow as pa
import pyarrow.flight as fl

from strandline.formats.ticket import FeedTicket, FileTicket, ReadTicket, ReportTicket, decode_ticket, encode_ticket
from strandline.formats.wire import decode_advance, encode_answer
from strandline.model.errors import InvalidInput, NotReady, StrandlineError
from strandline.model.node import NO_BEAT
from strandline.model.records import RECORD_SCHEMA
from strandline.node.contract import Caller, Served
from strandline.node.flight.actions import ACTIONS, act
from strandline.node.flight.appending import collect, read_command
from strandline.node.flight.connections import Connection, Connections, parse_peer
from strandline.node.flight.failures import answering, first_line, leaving, stopping, unknown_caller
from strandline.node.flight.limits import MemoryBudget, Place, ServerLimits, Turnstile, share_heaps
from strandline.node.flight.security import Role, ServerSecurity, Session, check_listening
from strandline.node.flight.streams import CHUNK_SCHEMA, Pace, feeding, pieces, read_schema, reading
from strandline.node.flight.values import write_commit
from strandline.node.registry import Progress
from strandline.storage.ambient import CLOCK, Clock
from strandline.storage.process import Origin, bound_to_process, call_in_child

_PATIENCE: Final = 1.0
"""For so many seconds closing waits for the streams to end."""

_EXIT_PATIENCE: Final = 6.0
"""And so many the end of the process: longer than a stream of reports lasts."""

_LOOK: Final = 0.01
_CALL: Final = "call"
_STREAMED: Final = (fl.FlightMethod.DO_PUT, fl.FlightMethod.DO_EXCHANGE)
"""Calls that are known of before their first message."""

_READ_PATIENCE: Final = 2.0
"""For so many seconds a reader waits until others have read what was read from the log for them."""


@bound_to_process(keep=("port", "url"))
@final
class FlightNode:
    """Serves a node over Arrow Flight, from when it is made until it is closed. Does not close the node itself.

    Listens on loopback unless it is told otherwise; other machines are let in only with ``security`` that says who
    they are, or with ``insecure=True``.
    """

    def __init__(
        self,
        served: Served,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        security: ServerSecurity | None = None,
        limits: ServerLimits | None = None,
        insecure: bool = False,
        beat_seconds: float = 1.0,
        clock: Clock = CLOCK,
    ) -> None:
        """Begin to serve; port 0 takes a free one. ``InvalidInput`` for a place that is not safe to listen on."""
        security = security or ServerSecurity()
        check_listening(host, security, insecure=insecure)
        self._stop = threading.Event()
        self._host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._scheme = "grpc+tls" if security.is_encrypted else "grpc"
        limits = limits or ServerLimits()
        share_heaps()
        self._turnstile = Turnstile(limits, clock=clock)
        self._connections = Connections(
            limits, silence=self._turnstile.silence, is_expecting=lambda: self._turnstile.is_expecting, clock=clock
        )
        self._server = _Server(
            served,
            f"{self._scheme}://{self._host}:{port}",
            security=security,
            limits=limits,
            turnstile=self._turnstile,
            connections=self._connections,
            stop=self._stop,
            beat_seconds=beat_seconds,
            clock=clock,
        )
        self._connections.watch(self.port)
        self._clock = clock
        self._ending: threading.Thread | None = None
        _let_exit(self._server)
        _NODES.add(self)
        self._origin = Origin(f"The server {self.url}", self)
        call_in_child(self, _NODES.discard)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.port
        return port

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"{self._scheme}://{self._host}:{self.port}"

    @property
    def calls(self) -> int:
        """How many calls and streams are open."""
        return self._turnstile.inside

    def close(self) -> None:
        """Take no more calls, and end the streams within about a second; closing twice is fine.

        Who neither reads its stream nor goes away keeps a thread until it does, and is not waited for. Nor are replicas
        that have nothing to report: their streams of reports end with the next one, or after a few seconds.
        """
        self._stop.set()
        if self._ending is None:
            # Flight waits for every call to end, for ever if need be. A daemon, so that no client keeps the process.
            self._connections.close()
            self._ending = threading.Thread(target=self._server.shutdown, name="strandline-flight-stop", daemon=True)
            self._ending.start()
            deadline = self._clock.monotonic() + _PATIENCE
            while self._ending.is_alive() and self._turnstile.busy and self._clock.monotonic() < deadline:
                self._ending.join(_LOOK)

    def _leave(self) -> None:
        self.close()
        if self._ending is not None:
            self._ending.join(_EXIT_PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_NODES: Final[weakref.WeakSet[FlightNode]] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """Give streams some time to end: a thread that comes back from one while the interpreter goes away aborts it."""
    for node in list(_NODES):
        node._leave()  # noqa: SLF001 - of the same module


class _Call(fl.ServerMiddleware):  # type: ignore[misc]
    """One call: who makes it, and its place among those that are under way."""

    def __init__(self, session: Session, place: Place, turnstile: Turnstile) -> None:
        super().__init__()
        self.session = session
        self.who = ""
        self._place = place
        self._turnstile = turnstile
        self._connection: Connection | None = None

    def begin(self, who: str, connection: Connection, *, is_reserved: bool, size: int) -> None:
        """It has come, with its first message, over this connection."""
        # In this order: at no time is it neither expected nor known, while what it sends is on its way.
        connection.begin(size)
        self.who, self._connection = who, connection
        self._turnstile.name(self._place, who, is_reserved=is_reserved)

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise AssertionError("a call begins before anything else is done with it")
        return self._connection

    def call_completed(self, exception: BaseException | None) -> None:
        self._turnstile.leave(self._place)
        if self._connection is not None:
            self._connection.end()


class _Door(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets calls in: with a token that is known, if there are any, and while there are not too many."""

    def __init__(self, security: ServerSecurity, turnstile: Turnstile) -> None:
        super().__init__()
        self._security = security
        self._turnstile = turnstile

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> _Call:
        grant = None
        if self._security.tokens is not None:
            grant = self._security.tokens.find(headers)
            if grant is None:
                raise unknown_caller(
                    "The call has no token that this node knows: send the header 'authorization: Bearer TOKEN'."
                )
        may_be_silent = info.method in _STREAMED
        # Where nobody says who calls, small calls may take the places that are kept: they have come whole.
        is_reserved = not may_be_silent if grant is None else grant.may(Role.REPLICA, Role.ADMIN)
        who = None if grant is None else grant.name
        try:
            place = self._turnstile.enter(who, is_reserved=is_reserved, may_be_silent=may_be_silent)
        except StrandlineError as error:
            raise leaving(error) from error
        return _Call(Session(grant), place, self._turnstile)


class _Server(fl.FlightServerBase):  # type: ignore[misc]
    """Flight's calls, each in a thread of its own."""

    def __init__(
        self,
        served: Served,
        location: str,
        *,
        security: ServerSecurity,
        limits: ServerLimits,
        turnstile: Turnstile,
        connections: Connections,
        stop: threading.Event,
        beat_seconds: float,
        clock: Clock,
    ) -> None:
        # Before the base: it serves as soon as it is made.
        self._served = served
        self._security = security
        self._limits = limits
        self._turnstile = turnstile
        self._connections = connections
        self._appended = MemoryBudget("appends", limits.memory_bytes, limits.memory_bytes_each)
        self._read = MemoryBudget("what is read", limits.reading_bytes, limits.reading_bytes_each)
        self._stop = stop
        self._beat_seconds = beat_seconds
        self._clock = clock
        options: dict[str, Any] = {}
        if security.is_encrypted:
            options["tls_certificates"] = [(security.certificate, security.key)]
        if security.client_roots is not None:
            options |= {"verify_client": True, "root_certificates": security.client_roots}
        super().__init__(location, middleware={_CALL: _Door(security, turnstile)}, **options)

    # --- who calls ---------------------------------------------------------------------------------------------

    def _session(self, context: Any, asked: str | None = None, *, size: int = 0) -> Session:
        """Who makes this call. Its place is counted by name, by the name that it says, or by its address."""
        call = _call_of(context)
        session = call.session
        if session.grant is None and self._security.client_roots is not None:
            session = Session(self._security.grant_of(context.peer_identity().decode(errors="replace")))
        grant = session.grant
        who = asked if grant is None else grant.name
        call.begin(
            who or parse_peer(context.peer())[0],
            self._connections.of(context.peer()),
            is_reserved=grant is None or grant.may(Role.REPLICA, Role.ADMIN),
            size=size,
        )
        return session

    def _live(self, context: Any) -> Callable[[], bool]:
        def live() -> bool:
            if self._stop.is_set():
                raise stopping()
            return not context.is_cancelled()

        return live

    # --- small calls -------------------------------------------------------------------------------------------

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        with answering("Listing actions"):
            self._session(context)
            return [(name, action.what) for name, action in ACTIONS.items()]

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        with answering(f"The action {action.type[:40]!r}"):
            self._refuse_when_stopping()
            session = self._session(context, size=len(action.body))
            return act(self._served, session, action.type, action.body.to_pybytes())

    def _refuse_when_stopping(self) -> None:
        if self._stop.is_set():
            raise stopping()

    # --- streams out -------------------------------------------------------------------------------------------

    def do_get(self, context: Any, ticket: Any) -> Any:
        with answering("Streaming"):
            self._refuse_when_stopping()
            live, pace = self._live(context), Pace(self._beat_seconds, self._clock)
            match decode_ticket(ticket.ticket):
                case ReadTicket() as asked:
                    self._session(context, size=len(ticket.ticket)).need(Role.CLIENT, Role.REPLICA, Role.ADMIN)
                    call, schema = _call_of(context), read_schema(asked.columns)

                    def hold(size: int) -> AbstractContextManager[None]:
                        return self._read.waited_for(call.who, size, _READ_PATIENCE)

                    return _stream(schema, reading(self._served.reading(), asked, live, pace, hold), call.connection)
                case FileTicket() as asked:
                    caller = self._replica(context, asked)
                    files = pieces(self._served, asked, caller, live)
                    return _stream(CHUNK_SCHEMA, files, _call_of(context).connection)
                case FeedTicket() | ReportTicket():
                    raise InvalidInput("This ticket is for an exchange: it is not to be had as a stream.")

    def _replica(self, context: Any, asked: FeedTicket | FileTicket) -> Caller:
        return self._session(context, asked.replica).replica(asked.replica, asked.term)

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        with answering("Listing"):
            self._session(context).need(Role.CLIENT, Role.REPLICA, Role.ADMIN)
            yield self._info(None, ReadTicket())

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        with answering("Describing the log"):
            self._session(context).need(Role.CLIENT, Role.REPLICA, Role.ADMIN)
            return self._info(descriptor, _asked_for(descriptor))

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        with answering("Describing the log"):
            self._session(context).need(Role.CLIENT, Role.REPLICA, Role.ADMIN)
            return fl.SchemaResult(read_schema(_asked_for(descriptor).columns))

    def _info(self, descriptor: Any, ticket: ReadTicket) -> Any:
        log = self._served.reading()
        if descriptor is None:
            descriptor = fl.FlightDescriptor.for_path(str(log.log_id))
        bounds = log.bounds()
        first = bounds.first if ticket.since is None else ticket.since.next
        end = bounds.next if ticket.upto is None else ticket.upto
        records = -1 if ticket.follow else max(0, end - first)
        # No location means: where this was asked.
        endpoint = fl.FlightEndpoint(encode_ticket(ticket), [])
        return fl.FlightInfo(read_schema(ticket.columns), descriptor, [endpoint], records, -1)

    # --- streams in --------------------------------------------------------------------------------------------

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with answering("The append"):
            self._refuse_when_stopping()
            self._session(context).need(Role.CLIENT, Role.ADMIN)
            command = read_command(descriptor.command, self._limits)
            call = _call_of(context)
            with self._appended.held_by(call.who) as hold:

                def take(size: int) -> None:
                    call.connection.dealt_with(size)
                    hold(size)

                with call.connection.appending():
                    records = collect(reader.schema, lambda: _next_batch(reader, call.connection), self._limits, take)
                commit = self._served.append(
                    records, append=command.append, policy=command.policy, timeout=command.timeout
                )
            with contextlib.suppress(OSError):  # it is done, and who asked for it is gone
                writer.write(pa.py_buffer(write_commit(commit)))

    # --- streams of replicas -----------------------------------------------------------------------------------

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with answering("The exchange"):
            self._refuse_when_stopping()
            match decode_ticket(descriptor.command or b""):
                case FeedTicket() as asked:
                    self._feed(context, asked, writer)
                case ReportTicket(name):
                    session = self._session(context, name)
                    self._hear(session, name, reader, writer, _call_of(context).connection)
                case _:
                    raise InvalidInput("This ticket is for a stream: ask for that.")

    def _feed(self, context: Any, asked: FeedTicket, writer: Any) -> None:
        """Log batches for a replica. Flight would begin a Python thread anew for each one that it asks a stream for."""
        caller = self._replica(context, asked)
        live, pace = self._live(context), Pace(self._beat_seconds, self._clock)
        connection = _call_of(context).connection
        with self._turnstile.feeding(caller.name):
            writer.begin(RECORD_SCHEMA)
            for batch, note in feeding(self._served, asked, caller, live, pace):
                with connection.waiting():
                    if batch is None:
                        writer.write_metadata(note)
                    else:
                        writer.write_with_metadata(batch, note)

    def _hear(self, session: Session, name: str, reader: Any, writer: Any, connection: Connection) -> None:
        """Progress reports of one replica, each dealt with before the next: a call of its own each would cost twice."""
        where = f"replica {name!r}"
        caller = Caller(name, -1)
        with self._turnstile.idle():  # it waits for its client, all but a moment now and then
            while (chunk := _next_chunk(reader, connection)) is not None:
                self._refuse_when_stopping()
                if chunk.app_metadata is None:
                    continue
                advance = decode_advance(chunk.app_metadata.to_pybytes(), where)
                progress = Progress(advance.applied, advance.durable, advance.apply_errors, advance.divergences)
                if caller.term != advance.term:
                    caller = session.replica(name, advance.term)
                answer = self._answer(caller, progress, is_wanted=advance.is_answered)
                if answer is not None:
                    with connection.waiting():
                        writer.write_metadata(pa.py_buffer(answer))

    def _answer(self, caller: Caller, progress: Progress, *, is_wanted: bool) -> bytes | None:
        """Of a report that no answer is wanted to, only why it did not count: its sender reads that next."""
        if is_wanted:
            answer = self._served.acknowledge(caller, progress)
            return encode_answer(answer.beat, answer.refused)
        refused = self._served.tell(caller, progress)
        return None if refused is None else encode_answer(NO_BEAT, refused)


def _let_exit(server: Any) -> None:
    """Do not let the process wait at its end, for ever if need be, for clients that do not go away.

    Flight has registered that it does, and no public call undoes it; where this does not, such an exit does not end.
    """
    for waiting in list(getattr(weakref.finalize, "_registry", ())):
        found = waiting.peek()
        if found is not None and found[0] is server:
            waiting.atexit = False


def _asked_for(descriptor: Any) -> ReadTicket:
    """What a description is asked of: the ticket that is the command, or else the whole log."""
    ticket = decode_ticket(descriptor.command or b"")
    if not isinstance(ticket, ReadTicket):
        raise NotReady("Only what readers may read is described.")
    return ticket


def _call_of(context: Any) -> _Call:
    call: _Call = context.get_middleware(_CALL)
    return call


def _stream(schema: pa.Schema, parts: Any, connection: Connection) -> Any:
    def answered() -> Iterator[Any]:
        with answering("Streaming"), contextlib.closing(parts):
            for part in parts:
                with connection.waiting():  # until Flight asks for the next, since this one is sent
                    yield part

    return fl.GeneratorStream(schema, answered())


def _next_batch(reader: Any, connection: Connection) -> pa.RecordBatch | None:
    while (chunk := _next_chunk(reader, connection)) is not None:
        if chunk.data is not None:
            return chunk.data
    return None


def _next_chunk(reader: Any, connection: Connection) -> Any:
    try:
        with connection.waiting():
            chunk = reader.read_chunk()
        connection.dealt_with(0 if chunk.app_metadata is None else len(chunk.app_metadata))
        return chunk  # noqa: TRY300 - the errors are those of reading it
    except StopIteration:
        return None
    except OSError as error:  # Arrow says so of messages that are no Arrow
        raise InvalidInput(f"What was sent cannot be read: {first_line(error)}.") from error
