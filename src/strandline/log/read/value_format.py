"""The value format of any log: the codec that its identity names, and reading with values that it has decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NoReturn

import pyarrow as pa

from strandline.errors import InvalidInput, UnsupportedCall
from strandline.formats.json.value_versions import ValueVersion
from strandline.log.contract import LogReading
from strandline.model.arguments import checked
from strandline.model.cursor import Start
from strandline.values.contract import Codec
from strandline.values.decoding import BadRows, decode_records, value_fields

NO_FORMAT: Final = (
    "it records no value format. A queue of version 1 has no place for it, and replicas of a node would not know its "
    "changes after a failover. Give the codec to producers, sinks and readers."
)


class WithoutFormat:
    """Base class of logs that have no place for a value format: there it is unknown, which is not the same as none."""

    @property
    def value(self) -> NoReturn:
        """``Unsupported``."""
        raise UnsupportedCall(f"{self!r} has no value format: {NO_FORMAT}")

    value_versions = evolve_value = value


def named_codec(log: object) -> Codec | None:
    """The codec that a log names for its values, in the newest version; None: its values are plain bytes.

    ``Unsupported`` for a log that has no place for it: there the format is unknown, which is not the same.
    """
    found: Codec | None = log.value  # type: ignore[attr-defined]
    return found


def named_versions(log: object) -> tuple[ValueVersion, ...]:
    """All versions of a log's value format; none if values are plain bytes, or the log has no place for a format."""
    found: tuple[ValueVersion, ...] = getattr(log, "value_versions", ())
    return found


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
