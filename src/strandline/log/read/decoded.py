"""Reading with decoded values: typed Arrow batches of any log."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.log.contract import LogReading
from strandline.log.read.value_format import named_codec
from strandline.model.arguments import checked
from strandline.model.cursor import Start
from strandline.values.contract import Codec
from strandline.values.decoding import BadRows, decode_records, value_fields


@checked
def read_decoded(
    log: LogReading,
    since: Start | None = None,
    *,
    upto: int | None = None,
    value: Codec | None = None,
    bad: BadRows = "fail",
) -> Iterator[pa.RecordBatch]:
    """Batches with the value's fields as columns, and ``_key``, ``_offset``, ``_timestamp``, ``_op``, ``_headers``.

    As ``log.read``, from ``since`` (all that is retained) up to ``upto`` (the end as of now), with the codec that the
    log names, or another one (``value``). A value that cannot be decoded is ``BadRecord`` with its offset; with
    ``bad="null"`` its fields are null, ``_error`` has the reason and ``_value`` the bytes.

    ``InvalidInput`` if the log names no codec, ``Unsupported`` if it cannot.

    >>> import strandline as sl
    >>> log = sl.open("memory://doctest-decoded", create=True, value=sl.values.Json(pa.schema({"id": pa.int64()})))
    >>> with log.producer() as producer:
    ...     _ = producer.append(key=b"a", value={"id": 7})
    ...     _ = producer.append(key=b"b", value=b"no JSON").result()
    >>> [batch] = sl.log.read_decoded(log, bad="null")
    >>> batch.select(["id", "_offset", "_value"]).to_pylist()
    [{'id': 7, '_offset': 0, '_value': None}, {'id': None, '_offset': 1, '_value': b'no JSON'}]
    """
    # The end first: all versions that records before it were written with are recorded by then.
    end = log.position_of("now") if upto is None else upto
    codec = named_codec(log) if value is None else value
    if codec is None:
        raise InvalidInput(f"{log!r} names no format for its values, so that they are bytes: name a codec.")
    value_fields(codec)
    return (decode_records(batch, codec, bad) for batch in log.read(since, upto=end))
