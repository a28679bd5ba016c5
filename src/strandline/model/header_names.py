"""Names of headers: text, which Arrow does not check. Pure functions on Arrow."""

from __future__ import annotations

import pyarrow as pa

from strandline.errors import InvalidInput


def check_header_names(headers: pa.ChunkedArray) -> None:
    """``InvalidInput`` if a name is no UTF-8: a batch with it could be stored, and never read again."""
    if headers.null_count == len(headers):  # mostly
        return
    for chunk in headers.chunks:
        try:
            _names_of(chunk).validate(full=True)
        except pa.ArrowInvalid as error:
            raise InvalidInput(
                "A batch has a header whose name is no UTF-8: decode its bytes, or give them as the header's value."
            ) from error


def with_readable_names(batch: pa.RecordBatch) -> pa.RecordBatch:
    r"""A stored batch with text in place of header names that are no UTF-8, which earlier versions accepted.

    >>> names = pa.array([b"ok", b"\xffx"]).view(pa.string())
    >>> headers = pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), names, pa.array([b"1", b"2"]))
    >>> with_readable_names(pa.record_batch({"headers": headers})).to_pylist()
    [{'headers': [('ok', b'1'), ('\\xffx', b'2')]}]
    """
    at = batch.schema.get_field_index("headers")
    if at < 0 or not pa.types.is_map(batch.schema.field(at).type):
        return batch
    column = batch.column(at)
    names = column.keys.view(pa.binary())
    _with_names(column, names).validate(full=True)  # before one is looked at: the offsets may be anything
    texts = [name.decode(errors="backslashreplace") for name in names.to_pylist()]
    return batch.set_column(at, batch.schema.field(at), _with_names(column, pa.array(texts, pa.string())))


def _with_names(headers: pa.MapArray, names: pa.Array) -> pa.MapArray:
    kind = pa.map_(names.type, headers.type.item_type)
    entries = pa.StructArray.from_arrays([names, headers.items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(headers), headers.buffers()[:2], offset=headers.offset, children=[entries])


def _names_of(headers: pa.MapArray) -> pa.Array:
    """The names of these rows; without those of others, of which they may be a slice."""
    if not len(headers):
        return headers.keys.slice(0, 0)
    ends = headers.offsets
    first = ends[0].as_py()
    return headers.keys.slice(first, ends[-1].as_py() - first)
