"""Decoding batch objects, always fully validated."""

from __future__ import annotations

import os
from statistics import median
from uuid import UUID

from benchmarks.harness import Result, in_turns
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.object.batch import BatchInfo, decode_batch, encode_batch
from strandline.model.head import WriterId
from strandline.model.records import record_batch

_ROWS = 1 << 20
_PAGE = 1 << 16


def run() -> list[Result]:
    values = [os.urandom(24).hex().encode() + b"order-like text that repeats, so so" for _ in range(4096)]
    batch = record_batch(
        timestamps=range(_ROWS),
        ops=bytes(_ROWS),
        keys=[b"%08d" % row for row in range(_ROWS)],
        values=values * (_ROWS // 4096),
    )
    objects = []
    for compression in (Compression.NONE, Compression.LZ4, Compression.ZSTD):
        pages = [encode_page(batch.slice(at, _PAGE), compression) for at in range(0, _ROWS, _PAGE)]
        info = BatchInfo(compression, _ROWS, len(pages), 0, 0, WriterId(UUID(int=0)), 0)
        objects.append(b"".join(encode_batch(pages, info)))
    times = in_turns([lambda data=data: decode_batch(data, "it") for data in objects], 9)
    goals = {"none": ">= 30", "lz4": ">= 10", "zstd": ""}
    return [
        Result(f"decode_{name}", _ROWS / median(taken) / 1e6, "M records/s", goal, "records of 100 bytes, validated")
        for (name, goal), taken in zip(goals.items(), times, strict=True)
    ]
