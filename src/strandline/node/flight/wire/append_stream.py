"""An append over Flight: a command, and Arrow batches that become one batch of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from strandline.errors import InvalidInput, TransientStorageError
from strandline.formats.arrow.header import admit_batch, memory_of
from strandline.formats.json.fields import Fields, write_fields
from strandline.model.head import WriterId, proof_of, proven
from strandline.model.records import HEADERS, RECORD_SCHEMA
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.wire.protocol import (
    FlightData,
    arrow_message,
    read_batch,
    read_flight_data,
    read_schema_message,
)
from strandline.node.lead.policies import CommitPolicy, as_policy

_USUAL_TIMEOUT: Final = 5.0

PART_BYTES: Final = 4 << 20
"""Target size of a message: batches are sent in parts of it, and larger records in pieces."""

_MORE, _LAST_PIECE = 0, 1
"""First byte of a piece of a batch."""


@dataclass(frozen=True, slots=True)
class AppendCommand:
    """The parameters of an append."""

    append: tuple[WriterId, int] | None = None
    policy: CommitPolicy | None = None
    timeout: float = _USUAL_TIMEOUT
    expect: int | None = None
    rows: int | None = None
    """The records of the batch. A connection that breaks may look like the end of the append."""
    seal: bool = False
    """Whether the log ends with the batch. Nodes of earlier versions refuse it."""

    def check(self, records: pa.Table) -> None:
        """``TransientStorageError`` if fewer or more records arrived than the caller has announced."""
        if self.rows not in (None, records.num_rows):
            raise TransientStorageError(
                f"{records.num_rows:,} of the {self.rows:,} records of an append arrived, and nothing was appended: "
                "send it again."
            )


def write_command(command: AppendCommand) -> bytes:
    """The bytes of a command."""
    fields: dict[str, Any] = {"policy": command.policy and str(command.policy), "timeout": command.timeout}
    if command.append is not None:
        writer, number = command.append
        proof = proof_of(writer)
        fields |= {"writer": str(writer), "number": number} | ({} if proof is None else {"proof": str(proof)})
    if command.expect is not None:
        fields["expect"] = command.expect
    if command.rows is not None:
        fields["rows"] = command.rows
    if command.seal:
        fields["seal"] = True
    return write_fields(fields)


def read_command(data: bytes | None, limits: ServerLimits) -> AppendCommand:
    """The command in these bytes, with defaults for what is missing; ``InvalidInput`` if it cannot be read."""
    fields = Fields.parse(data or b"{}", "The command of an append")
    fields.only("writer", "number", "policy", "timeout", "expect", "proof", "rows", "seal")
    if ("writer" in fields) != ("number" in fields):
        raise fields.refused("it needs both a writer and a number, or neither")
    writer = proven(WriterId(fields.uuid("writer")), fields.maybe_proof("proof")) if "writer" in fields else None
    append = None if writer is None else (writer, fields.natural("number"))
    timeout = fields.seconds("timeout") if "timeout" in fields else _USUAL_TIMEOUT
    if timeout > limits.append_seconds:
        raise fields.refused(f"it waits for {timeout:g} s, and {limits.append_seconds:g} are the most")
    policy = as_policy(fields.maybe_text("policy", longest=1 << 16))
    expect, rows = fields.maybe_natural("expect"), fields.maybe_natural("rows")
    return AppendCommand(append, policy, timeout, expect, rows, fields.flag("seal"))


def collect(
    first: FlightData,
    receive: Callable[[], bytes | None],
    limits: ServerLimits,
    take: Callable[[int], None] = lambda _: None,
) -> pa.Table:
    """The batches of one append as a table, checked; ``InvalidInput`` as soon as they are too many or too large.

    ``first`` is the message with the schema, ``receive`` gives the following ones. ``take`` is called with the memory
    of each, before the next is received; it may raise ``Overloaded``.
    """
    schema = read_schema_message(arrow_message(first.header, first.body))
    check_types(schema)
    batches: list[pa.RecordBatch] = []
    size = 0

    def count(taken: int) -> None:
        nonlocal size
        size += taken
        if size > limits.append_bytes or len(batches) >= limits.append_batches:
            raise InvalidInput(
                f"An append of {size:,} bytes in {len(batches) + 1} Arrow batches is over the node's limit of "
                f"{limits.append_bytes:,} bytes in {limits.append_batches}: append it in parts."
            )
        take(taken)

    pieces = bytearray()
    messages = 0
    while (message := receive()) is not None:
        messages += 1
        if messages > limits.append_batches:
            raise InvalidInput(
                f"An append in more than {limits.append_batches} messages is over the node's limit: send larger ones, "
                "or append it in parts."
            )
        data = read_flight_data(message)
        if data.header:
            if pieces:
                raise InvalidInput("A batch arrived between the pieces of another.")
            taken, batch = 0, read_batch(arrow_message(data.header, data.body), schema, limits.append_bytes)
        elif data.metadata:
            count(len(data.metadata))
            pieces += data.metadata[1:]
            if data.metadata[0] != _LAST_PIECE:
                continue
            # Counted twice while it is assembled: the pieces, and the batch.
            taken, batch = len(pieces), read_batch(pa.py_buffer(bytes(pieces)), schema, limits.append_bytes)
            pieces = bytearray()
        else:
            continue
        batch = admit_batch(batch, "An Arrow batch of the append", wrong=InvalidInput)
        count(max(0, memory_of(batch) - taken))
        batches.append(batch)
    if pieces:
        raise InvalidInput("The append ended between the pieces of a batch.")
    return pa.Table.from_batches(batches, schema)


def as_messages(table: pa.Table) -> Iterator[pa.RecordBatch | bytes]:
    """A table as messages: batches of about a part's size, and pieces of larger records."""
    rows = max(1, table.num_rows * PART_BYTES // max(table.nbytes, 1))
    for batch in table.to_batches(max_chunksize=rows):
        yield from _messages(batch)


def _messages(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | bytes]:
    if batch.nbytes <= PART_BYTES:
        yield batch
    elif batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _messages(batch.slice(0, half))
        yield from _messages(batch.slice(half))
    else:
        data = memoryview(batch.serialize()).cast("B")
        for start in range(0, len(data), PART_BYTES):
            is_last = start + PART_BYTES >= len(data)
            yield b"".join((bytes([_LAST_PIECE if is_last else _MORE]), data[start : start + PART_BYTES]))


def check_types(schema: pa.Schema) -> None:
    """Refuse types whose values may be larger than their message: dictionaries, run-end encodings and views."""
    if len(schema) > len(RECORD_SCHEMA):
        raise InvalidInput(f"An append of {len(schema)} columns has more than a record: send {RECORD_SCHEMA.names}.")
    for column in schema:
        kind = column.type
        if not any(is_plain(kind) for is_plain in _PLAIN) and not kind.equals(HEADERS):
            raise InvalidInput(
                f"The column {column.name!r} is a {kind}, which an append cannot hold: send plain bytes."
            )


_PLAIN: Final = (
    pa.types.is_null,
    pa.types.is_integer,
    pa.types.is_timestamp,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_string,
    pa.types.is_large_string,
)
