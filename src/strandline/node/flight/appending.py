"""An append as it comes over the wire: a command, and Arrow batches that are one batch of the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from strandline.formats.json_fields import Fields, write_fields
from strandline.formats.received import admit_batch, memory_of
from strandline.model.errors import InvalidInput
from strandline.model.head import WriterId
from strandline.model.records import HEADERS, RECORD_SCHEMA
from strandline.node.flight.limits import ServerLimits

_USUAL_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class AppendCommand:
    """What an append asks for besides its records."""

    append: tuple[WriterId, int] | None = None
    policy: str | None = None
    timeout: float = _USUAL_TIMEOUT


def write_command(command: AppendCommand) -> bytes:
    """The bytes of a command."""
    fields: dict[str, Any] = {"policy": command.policy, "timeout": command.timeout}
    if command.append is not None:
        fields |= {"writer": str(command.append[0]), "number": command.append[1]}
    return write_fields(fields)


def read_command(data: bytes | None, limits: ServerLimits) -> AppendCommand:
    """What is asked for; no command asks for nothing special. ``InvalidInput`` for what makes no sense."""
    fields = Fields.parse(data or b"{}", "The command of an append").only("writer", "number", "policy", "timeout")
    if ("writer" in fields) != ("number" in fields):
        raise fields.refused("a writer needs a number, and a number a writer")
    append = (WriterId(fields.uuid("writer")), fields.natural("number")) if "writer" in fields else None
    timeout = fields.seconds("timeout") if "timeout" in fields else _USUAL_TIMEOUT
    if timeout > limits.append_seconds:
        raise fields.refused(f"it waits for {timeout:g} s, and {limits.append_seconds:g} are the most")
    return AppendCommand(append, fields.maybe_text("policy", longest=1 << 16), timeout)


def collect(
    schema: pa.Schema,
    chunks: Callable[[], pa.RecordBatch | None],
    limits: ServerLimits,
    take: Callable[[int], None] = lambda _: None,
) -> pa.Table:
    """The batches of one append as a table, checked; ``InvalidInput`` as soon as they are too many or too large.

    ``take`` is told of each how much memory it takes, before the next is received; it may raise ``Overloaded``.
    """
    check_types(schema)
    batches: list[pa.RecordBatch] = []
    size = count = 0
    while (chunk := chunks()) is not None:
        batch = admit_batch(chunk, "An Arrow batch of the append", wrong=InvalidInput)
        count += 1
        taken = memory_of(batch)
        size += taken
        if taken > limits.message_bytes:
            raise InvalidInput(
                f"An Arrow batch of {taken:,} bytes is over the node's limit of {limits.message_bytes:,}: send it in "
                "several, which are one append together."
            )
        if size > limits.append_bytes or count > limits.append_batches:
            raise InvalidInput(
                f"An append of {size:,} bytes in {count} Arrow batches is over the node's limit of "
                f"{limits.append_bytes:,} bytes in {limits.append_batches}: append it in parts."
            )
        take(taken)
        batches.append(batch)
    return pa.Table.from_batches(batches, schema)


def check_types(schema: pa.Schema) -> None:
    """Refuse columns whose values may be larger than what came: a dictionary's, or those of runs and views."""
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
