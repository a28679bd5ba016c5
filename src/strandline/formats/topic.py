"""The partition count of a topic on logs (``topic.json``)."""

from __future__ import annotations

import json
from typing import Final

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.json.checked import check_checksum, with_checksum
from strandline.model.json_values import parse_object

FORMAT_VERSION: Final = 1

_KIND: Final = "strandline-topic"


def encode_topic(partition_count: int) -> bytes:
    """``topic.json``."""
    fields = {
        "kind": _KIND,
        "version": FORMAT_VERSION,
        "min_reader": FORMAT_VERSION,
        "partition_count": partition_count,
    }
    return json.dumps(with_checksum(fields), indent=1, sort_keys=True).encode() + b"\n"


def decode_topic(data: bytes | memoryview, where: str) -> int:
    """The number of partitions in ``topic.json``; errors say what to do."""
    try:
        fields = parse_object(data)
        kind, min_reader, count = fields["kind"], fields["min_reader"], fields["partition_count"]
    except (ValueError, KeyError) as error:
        raise CorruptData(f"{where} is damaged: {error!r}. Restore it.") from error
    if kind != _KIND:
        raise CorruptData(f"{where} describes a {str(kind)[:80]!r}, which is no topic: give another address.")
    if type(min_reader) is not int or min_reader < 0:
        raise CorruptData(f"{where} is damaged: {str(min_reader)[:80]!r} is no version. Restore it.")
    if min_reader > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"{where} needs a reader of version {min_reader}, and this program is of version {FORMAT_VERSION}: "
            "upgrade strandline."
        )
    try:
        check_checksum(fields)
    except ValueError as error:
        raise CorruptData(f"{where} is damaged: {error}. Restore it.") from error
    if type(count) is not int or count < 1:
        raise CorruptData(f"{where} is damaged: {str(count)[:80]!r} is no number of partitions. Restore it.")
    return count
