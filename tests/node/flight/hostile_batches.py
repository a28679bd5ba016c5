"""Arrow batches that lie about themselves, as the header and the body of an Arrow message."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

from strandline.model.records import record_batch
from tests.node.flight.raw_grpc import message_of

ROWS = 1013
"""A number that is nowhere else in the header."""


def honest() -> pa.RecordBatch:
    """A batch of records with keys, values and headers."""
    return record_batch(
        timestamps=[7] * ROWS,
        ops=[0] * ROWS,
        keys=[b"key"] * ROWS,
        values=[b"value"] * ROWS,
        headers=[{"a": b"1"}] * ROWS,
    )


def _patched(header: bytes, old: int, new: int, *, every: bool = False) -> bytes:
    found = struct.pack("<q", old)
    assert found in header
    return header.replace(found, struct.pack("<q", new), -1 if every else 1)


def _buffers(header: bytes, body: bytes) -> Iterator[tuple[int, int, int]]:
    """Of each buffer, where the header tells of it, where it begins and how long it is."""
    # The vector of buffers: pairs of offset and length, the first of which begins at 0.
    for at in range(0, len(header) - 16, 4):
        start, size = struct.unpack_from("<qq", header, at)
        if start == 0 and 0 <= size <= len(body):
            following, _ = struct.unpack_from("<qq", header, at + 16)
            count = struct.unpack_from("<I", header, at - 4)[0]
            if following == (size + 63) // 64 * 64 and 10 <= count <= 40:
                for index in range(count):
                    yield at + 16 * index, *struct.unpack_from("<qq", header, at + 16 * index)
                return
    raise AssertionError("the header has no buffers")


def hostile() -> dict[str, tuple[bytes, bytes]]:
    """Lies, by what is wrong with each."""
    header, body = message_of(honest())
    buffers = list(_buffers(header, body))
    lies: dict[str, tuple[bytes, bytes]] = {
        "a negative number of rows": (_patched(header, ROWS, -1), body),
        "a negative number of rows in every column": (_patched(header, ROWS, -ROWS, every=True), body),
        "more rows than fit any memory": (_patched(header, ROWS, 1 << 60, every=True), body),
        "more rows than there are bytes": (_patched(header, ROWS, 1 << 31, every=True), body),
        "a body that is missing": (header, b""),
        "a body that is cut": (header, body[: len(body) // 2]),
        "a header that is cut": (header[: len(header) // 2], body),
        "no header": (b"", body),
    }
    for number, (at, start, size) in enumerate(buffers):
        if not size:
            continue  # nothing is null, and nobody looks at what would tell so
        if size >= 4 * (ROWS + 1) or (size and number > len(buffers) - 6):
            for what, value in (("far out", 0x3FFFFFFF), ("before", -0x3FFFFFFF)):
                spoiled = bytearray(body)
                for place in range(start + size // 8 * 4, start + size // 8 * 4 + 4, 4):
                    spoiled[place : place + 4] = struct.pack("<i", value)
                lies[f"buffer {number} leads {what}"] = (header, bytes(spoiled))
            last = bytearray(body)
            last[start + 4 * ROWS : start + 4 * ROWS + 4] = struct.pack("<i", 0x7FFFFFFF)
            lies[f"buffer {number} ends far out"] = (header, bytes(last))
        for what, where, length in (
            ("begins behind the body", len(body) + 64, size),
            ("begins before the body", -64, size),
            ("is longer than the body", start, 1 << 40),
            ("has a negative length", start, -8),
            ("is empty", start, 0),
        ):
            changed = bytearray(header)
            struct.pack_into("<qq", changed, at, where, length)
            lies[f"buffer {number} {what}"] = (bytes(changed), body)
    return lies
