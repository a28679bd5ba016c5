"""Change events around typed values: Debezium's envelope, and plain ``before`` and ``after``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.model.records import Op
from strandline.values.codecs.columns import null_rows
from strandline.values.codecs.rows import CodecValue
from strandline.values.codecs.structs import StructCodec
from strandline.values.contract import Codec, Columns, Decoded, bad_rows, rounds_floats
from strandline.values.schema.constraints import Constrained, Constraints
from strandline.values.schema.evolution import conform_columns

_PUTS: Final = ("c", "r", "u")


class _Envelope(CodecValue, ABC):
    """A codec of change events: ``decode`` gives the changed row, and whether it is a put or a delete."""

    _FURTHER: ClassVar[tuple[pa.Field, ...]]
    __slots__ = ("_codec", "_event")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._event: Codec = codec
        if isinstance(codec, StructCodec) and "after" not in codec.schema.names:
            self._event = type(codec)(self._events(pa.struct(list(codec.schema)), codec.constraints))
        after = self._event.schema.field("after").type if "after" in self._event.schema.names else None
        if after is None or not pt.is_struct(after):
            raise SchemaRefused(
                f"{type(self).__name__} takes a codec of rows (sl.values.Json, sl.values.MessagePack), or one whose "
                "schema has the event's fields 'before' and 'after'."
            )
        self._schema = pa.schema(list(after))

    def _events(self, row: pa.DataType, constraints: Constraints) -> Constrained:
        """The fields of an event. ``before`` has no constraints: a source may give only the key there."""
        fields = [pa.field("before", row), pa.field("after", row), *self._FURTHER]
        schema = pa.schema([*fields, pa.field("payload", pa.struct(fields))])
        after = {"after": constraints}
        return Constrained(schema, {"properties": {**after, "payload": {"properties": after}}} if constraints else {})

    @property
    def codec(self) -> Codec:
        """The codec of a row, or of a whole event, as given."""
        return self._codec

    @property
    def rounds_floats(self) -> bool:
        """See :func:`~strandline.values.contract.rounds_floats`."""
        return rounds_floats(self._codec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._codec!r})"

    def settings(self) -> dict[str, Any]:
        """The codec of a row, or of a whole event."""
        return {"codec": self._codec}

    def decode(self, values: pa.Array) -> Decoded:
        """The row of each event and its operation; a null value, a tombstone, is a delete."""
        decoded = self._event.decode(values)
        events, count = decoded.columns, len(values)
        reasons = dict(zip(*decoded.bad.to_pydict().values(), strict=True))
        before, after = (self._part(events, name) for name in ("before", "after"))
        is_delete = self._deletes(events, before, after)
        tombstone = values.is_null() if not pt.is_null(values.type) else pa.array([True] * count, pa.bool_())
        unclear = pc.and_(is_delete.is_null(), pc.invert(tombstone))
        empty = pc.and_(pc.and_(pc.invert(pc.fill_null(is_delete, True)), after.is_null()), pc.invert(tombstone))
        for which, why in ((unclear, self._UNCLEAR), (empty, "The event is a put without 'after'.")):
            for row in pc.indices_nonzero(which).to_pylist():
                reasons.setdefault(row, why)
        gone = pc.fill_null(is_delete, True)
        rows = pc.add(pa.array(range(count), pa.int64()), pc.multiply(gone.cast(pa.int64()), count))
        chosen = pa.concat_arrays([after, before]).take(rows)
        columns = null_rows(chosen.flatten(), sorted(reasons))
        ops = pc.if_else(gone, pa.scalar(Op.DELETE, pa.int8()), pa.scalar(Op.PUT, pa.int8()))
        [ops] = null_rows([ops], sorted(reasons))
        return Decoded(pa.RecordBatch.from_arrays(columns, schema=self._schema), bad_rows(reasons), op=ops)

    _UNCLEAR: ClassVar[str]

    @abstractmethod
    def _deletes(self, events: pa.RecordBatch, before: pa.Array, after: pa.Array) -> pa.Array:
        """Which events are deletes; null where that is not clear."""

    def _part(self, events: pa.RecordBatch, name: str) -> pa.Array:
        """A field of the event, from inside its ``payload`` if it has one."""
        names = events.schema.names
        kind = self._event.schema.field("after").type if name in ("before", "after") else pa.string()
        plain = events.column(name) if name in names else pa.nulls(events.num_rows, kind)
        if "payload" not in names:
            return plain
        payload = events.column("payload")
        wrapped = pc.struct_field(payload, name)
        count = events.num_rows
        rows = pc.add(pa.array(range(count), pa.int64()), pc.multiply(payload.is_valid().cast(pa.int64()), count))
        return pa.concat_arrays([plain, wrapped]).take(rows)

    def encode(self, columns: Columns) -> pa.Array:
        """Encode each row as an event that puts it."""
        batch = conform_columns(columns, self._schema)
        count = batch.num_rows
        after = pa.StructArray.from_arrays(batch.columns, fields=list(self._schema))
        further = [pa.array([_PUTS[0]] * count, field.type) for field in self._FURTHER]
        names = ["after", *(field.name for field in self._FURTHER)]
        return self._event.encode(pa.RecordBatch.from_arrays([after, *further], names))


class Debezium(_Envelope):
    """Values that are Debezium's change events, with or without the ``schema`` and ``payload`` around them.

    ``c``, ``r`` and ``u`` put ``after``; ``d`` deletes, with the fields of ``before``; a null value deletes. Other
    events, such as a truncation, are bad rows.

    >>> from strandline.values import Json
    >>> codec = Debezium(Json(pa.schema({"id": pa.int64()})))
    >>> events = [b'{"op":"c","after":{"id":1}}', b'{"payload":{"op":"d","before":{"id":1}}}', None]
    >>> decoded = codec.decode(pa.array(events, pa.binary()))
    >>> decoded.op.to_pylist(), decoded.columns.column("id").to_pylist()
    ([0, 1, 1], [1, 1, None])

    Args:
        codec: The codec of a row, :class:`Json` or :class:`MessagePack`; or that of a whole event, such as an
            :class:`Avro` whose schema has ``before``, ``after`` and ``op``.
    """

    name = "debezium"
    _FURTHER = (pa.field("op", pa.string()),)
    _UNCLEAR = "The event has no 'op' that puts or deletes a row (c, r, u, d)."
    __slots__ = ()

    def _deletes(self, events: pa.RecordBatch, before: pa.Array, after: pa.Array) -> pa.Array:
        op = self._part(events, "op")
        puts = pc.is_in(op, value_set=pa.array(_PUTS, pa.string()))
        deletes = pc.equal(op, "d")
        return pc.if_else(pc.or_(puts, pc.fill_null(deletes, False)), deletes, pa.scalar(None, pa.bool_()))


class BeforeAfter(_Envelope):
    """Values that are change events with the row ``before`` and ``after``: without ``after`` it was deleted.

    >>> from strandline.values import Json
    >>> codec = BeforeAfter(Json(pa.schema({"id": pa.int64()})))
    >>> codec.decode(pa.array([b'{"after":{"id":1}}', b'{"before":{"id":1}}'], pa.binary())).op.to_pylist()
    [0, 1]

    Args:
        codec: As of :class:`Debezium`.
    """

    name = "before-after"
    _FURTHER = ()
    _UNCLEAR = "The event has neither 'before' nor 'after'."
    __slots__ = ()

    def _deletes(self, events: pa.RecordBatch, before: pa.Array, after: pa.Array) -> pa.Array:
        neither = pc.and_(before.is_null(), after.is_null())
        return pc.if_else(neither, pa.scalar(None, pa.bool_()), after.is_null())
