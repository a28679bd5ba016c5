"""A connection to a node: every call has a deadline, and re-raises the node's error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import SplitResult

import pyarrow as pa
import pyarrow.flight as fl

from strandline.errors import CorruptData, InvalidInput, TransientStorageError
from strandline.formats.json.fields import Fields, write_fields
from strandline.model.addresses import as_address, refuse_credentials, split_address
from strandline.node.flight.security import ClientSecurity, check_calling
from strandline.node.flight.wire.errors import node_errors
from strandline.node.message_json import answer
from strandline.storage.fork_check import Origin, bound_to_process

TIMEOUT: Final = 5.0
MESSAGE_BYTES: Final = 1 << 30
"""Larger messages of a node are refused: no Arrow batch of a log is larger."""

TOKEN_REMEDY: Final = "send a token (--token FILE, ClientSecurity(token=…)) or a certificate"  # noqa: S105 - says how

_SCHEMES: Final = ("grpc", "grpc+tcp", "grpc+tls")
_RECONNECT_MS: Final = (50, 1000)


def _is_node_address(url: str, place: SplitResult) -> bool:
    """Whether an address has a scheme, a host and a port, and nothing that a connection would ignore."""
    try:
        is_complete = place.scheme in _SCHEMES and bool(place.hostname) and place.port is not None
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and url.startswith(f"{place.scheme}://")
    return is_complete and is_plain and place.path in ("", "/") and not place.query and not place.fragment


@bound_to_process()
class Channel:
    """Calls to one node. Connects on first use, and reconnects by itself."""

    def __init__(self, url: str, *, security: ClientSecurity | None = None, timeout: float = TIMEOUT) -> None:
        """For the node at ``grpc://host:port`` or ``grpc+tls://host:port``."""
        url, security = as_address(url), security or ClientSecurity()
        refuse_credentials(url, TOKEN_REMEDY)
        place = split_address(url)
        if not _is_node_address(url, place):
            raise InvalidInput(f"{url!r} is no address of a node: use grpc://host:port or grpc+tls://host:port.")
        if timeout <= 0:
            raise InvalidInput(f"A timeout of {timeout} s is too short for any answer: give more than 0.")
        check_calling(place.hostname or "", security, encrypted=place.scheme == "grpc+tls")
        self.url = url
        self.timeout = timeout
        self._headers = [] if security.token is None else [(b"authorization", f"Bearer {security.token}".encode())]
        self.client: Any = fl.FlightClient(
            url,
            tls_root_certs=security.roots,
            cert_chain=security.certificate,
            private_key=security.key,
            override_hostname=security.hostname,
            generic_options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                # None: a small answer must not unpack into a large one.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                # A connection of its own, closed with the channel; a restarted node is found within a second.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
                ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS[1]),
                ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
            ],
        )
        self._origin = Origin(f"The connection to {url}", self)

    def options(self, timeout: float | None, signed: str | None = None) -> Any:
        """Options of a call with a deadline in seconds; None only for streams that detect silence themselves.

        A signed ticket is sent in place of a token.
        """
        headers = self._headers if signed is None else [(b"authorization", f"Ticket {signed}".encode())]
        if timeout is None:
            return fl.FlightCallOptions(headers=headers)
        return fl.FlightCallOptions(timeout=timeout, headers=headers)

    def call(self, action: str, *, timeout: float | None = None, **fields: Any) -> list[bytes]:
        """Call an action; returns its answer in pieces."""
        options = self.options(timeout or self.timeout)
        try:
            body = write_fields(fields)
        except UnicodeEncodeError as error:  # an argument of a command that is not UTF-8
            raise InvalidInput(f"{action!r} takes text that is UTF-8: {error.reason}.") from error
        with node_errors(self.url, f"{action!r}"):
            answers = self.client.do_action(fl.Action(action, body), options)
            return [each.body.to_pybytes() for each in answers]

    def ask(self, action: str, *, timeout: float | None = None, **fields: Any) -> Fields:
        """Call an action that answers with one object, or with nothing; ``CorruptData`` for anything else."""
        answers = self.call(action, timeout=timeout, **fields) or [b"{}"]
        if len(answers) != 1:
            raise CorruptData(f"{self.url} gave {len(answers)} answers to {action!r}: is it a node of this version?")
        return answer(answers[0], self.url)

    def get(self, ticket: bytes, schema: pa.Schema, *, timeout: float | None, signed: str | None = None) -> Any:
        """Open a stream of this schema, by a signed ticket if there is one; blocks until it begins."""
        return self._of_schema(self.client.do_get(fl.Ticket(ticket), self.options(timeout, signed)), schema)

    def _of_schema(self, reader: Any, schema: pa.Schema) -> Any:
        if not reader.schema.equals(schema):
            reader.cancel()
            raise CorruptData(f"{self.url} streams {str(reader.schema.names)[:200]} instead of {schema.names}.")
        return reader

    def put(
        self, command: bytes, messages: Iterable[pa.RecordBatch | bytes], schema: pa.Schema, timeout: float
    ) -> Fields:
        """Append batches and metadata; returns the node's answer to all of them."""
        descriptor = fl.FlightDescriptor.for_command(command)
        with node_errors(self.url, "an append"):
            writer, answers = self.client.do_put(descriptor, schema, self.options(timeout))
            try:
                for message in messages:
                    if isinstance(message, bytes):
                        writer.write_metadata(pa.py_buffer(message))
                    else:
                        writer.write_batch(message)
                writer.done_writing()
                found = answers.read()
            finally:
                # Raises the node's error if a write failed because of it.
                writer.close()
        if found is None:
            raise TransientStorageError(f"{self.url} did not answer an append: the records may be appended or not.")
        return answer(found.to_pybytes(), self.url)

    def exchange(self, command: bytes, timeout: float | None) -> tuple[Any, Any]:
        """Open an exchange: its writer and its reader; the caller ends it with :func:`end_exchange`."""
        pair: tuple[Any, Any] = self.client.do_exchange(fl.FlightDescriptor.for_command(command), self.options(timeout))
        return pair

    @contextlib.contextmanager
    def follow(self, command: bytes, schema: pa.Schema) -> Iterator[Any]:
        """The reader of an exchange in which only the node sends, of this schema; blocks until it begins."""
        writer, reader = self.exchange(command, None)
        try:
            writer.done_writing()
            yield self._of_schema(reader, schema)
        finally:
            end_exchange(writer, reader)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.client.close()


def end_exchange(writer: Any, reader: Any) -> None:
    """End both directions; errors of a broken stream were raised before."""
    with contextlib.suppress(pa.ArrowException):
        reader.cancel()
        writer.close()
