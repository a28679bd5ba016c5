"""The description of a stream that clients created (``stream.json``), as a cell's content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from strandline.formats.json.checked import damage, decode_description, sealed
from strandline.model.arguments import Natural
from strandline.model.json_values import PlainName, read_record, stamp_fields
from strandline.model.stamp import Stamped

FORMAT_VERSION: Final = 1
_KIND: Final = "strandline-stream"
_ADVICE: Final = "Restore the object."


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream: in which folder its log is, what it holds, and when it expires. Times are microseconds."""

    folder: PlainName
    """The folder of its log, beside this description. A stream that is made again gets another one."""
    content_type: str
    created: Natural
    used: Natural
    """About when it was last read or written, or created: written only now and then."""
    ttl: Natural | None = None
    """Seconds after its last use when it expires."""
    expires: Natural | None = None
    """When it expires, used or not."""
    deleted: bool = False
    """Whether it was deleted: the description stays, so that nobody takes an older one for the stream."""


class StreamCodec:
    """``stream.json`` as a cell's content."""

    def encode(self, state: Stamped[StreamDescription]) -> bytes:
        """The bytes of a description."""
        head = {"kind": _KIND, "version": FORMAT_VERSION, "min_reader": FORMAT_VERSION}
        return sealed({**head, **msgspec.to_builtins(state.value), **stamp_fields(state)})

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[StreamDescription]:
        """The description in these bytes, or an error that says what to do."""
        fields: dict[str, Any] = decode_description(
            data, where, _KIND, newest=FORMAT_VERSION, otherwise="no stream", advice=_ADVICE
        )
        with damage(where, _ADVICE):
            state = read_record(StreamDescription, fields, optional=("ttl", "expires", "deleted"))
            return read_record(Stamped, fields, value=state)
