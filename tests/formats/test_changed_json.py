"""Small JSON files: a changed byte is found, or changes nothing that the file says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from strandline.errors import StrandlineError
from strandline.formats.json.value_versions import ValueVersion
from strandline.formats.object.identity import LogIdentity, SlotCodec, decode_identity, encode_identity
from strandline.formats.topic import decode_topic, encode_topic
from strandline.formats.wal.folder import WalIdentity, decode_wal_identity, encode_wal_identity
from strandline.model.retention import SlotLimits, SlotState, parse_retention
from strandline.model.stamp import Stamped

_VALUES = (ValueVersion.of(1, "json", {"type": "record", "name": "order", "fields": []}),)
_IDENTITY = LogIdentity(
    UUID(int=0x1234567890), retention=parse_retention("age:7d"), limits=SlotLimits(1000, 3600), values=_VALUES
)
_WAL_IDENTITY = WalIdentity(UUID(int=7), _VALUES, 9, "text/plain")
_FILES: dict[str, tuple[bytes, Callable[[bytes, str], Any]]] = {
    "log.json of an object log": (encode_identity(_IDENTITY), decode_identity),
    "log.json of a write-ahead log": (
        encode_wal_identity(_WAL_IDENTITY),
        decode_wal_identity,
    ),
    "topic.json": (encode_topic(16), decode_topic),
    "a slot": (SlotCodec("s").encode(Stamped(SlotState("s", 120, "me", 3, 99), 4)), SlotCodec("s").decode),
}


@pytest.mark.parametrize("name", _FILES)
def test_a_changed_byte_is_found_or_changes_nothing(name: str) -> None:
    data, decode = _FILES[name]
    said = decode(data, "it")
    key = range(at := data.index(b'"checksum"') + 1, at + len(b"checksum"))
    for at in range(len(data)):
        for changed in {*(data[at] ^ (1 << bit) for bit in range(8)), *b' \t\n\r"0159afz'} - {data[at]}:
            damaged = data[:at] + bytes([changed]) + data[at + 1 :]
            try:
                found = decode(damaged, "it")
            except StrandlineError:
                continue
            assert found == said, (at, changed)
            # Harmless: another white space, and the name of the checksum, without which the file is an older one.
            assert at in key or (changed in b" \t\n\r" and data[at] in b" \t\n\r"), (at, changed)
