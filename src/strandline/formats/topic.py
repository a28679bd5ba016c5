"""The partition count of a topic on logs (``topic.json``)."""

from __future__ import annotations

from typing import Final

from strandline.formats.json.checked import damage, decode_description, sealed
from strandline.model.json_values import natural

FORMAT_VERSION: Final = 1

_KIND: Final = "strandline-topic"
_ADVICE: Final = "Restore it."


def encode_topic(partition_count: int) -> bytes:
    """``topic.json``."""
    return sealed(
        {
            "kind": _KIND,
            "version": FORMAT_VERSION,
            "min_reader": FORMAT_VERSION,
            "partition_count": partition_count,
        }
    )


def decode_topic(data: bytes | memoryview, where: str) -> int:
    """The number of partitions in ``topic.json``; errors say what to do."""
    fields = decode_description(
        data, where, _KIND, newest=FORMAT_VERSION, otherwise="no topic: give another address", advice=_ADVICE
    )
    with damage(where, _ADVICE):
        if count := natural(fields["partition_count"]):
            return count
        raise ValueError("it has no partitions")
