"""The names of a route's tables as JSON: which there are, since which offset, and up to where all are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from strandline.errors import UnsupportedVersion
from strandline.formats.json.checked import damage, decode_checked, sealed
from strandline.model.arguments import Natural
from strandline.model.cursor import Cursor
from strandline.model.json_values import PlainName, parse_object, read_record, stamp_fields
from strandline.model.stamp import Stamped

VERSION: Final = 1
_KIND: Final = "strandline-route-names"


@dataclass(frozen=True, slots=True)
class RouteNames:
    """The tables that a rule has made."""

    cursor: Cursor
    """Below, each name is known."""
    names: dict[str, int]
    """Each name with the offset at which its table begins."""
    by: str
    """What of a record is its name, such as ``field source.table``."""


class RouteNamesCodec:
    """The names as a cell's content."""

    def encode(self, state: Stamped[RouteNames]) -> bytes:
        """The bytes of a state."""
        fields = {"kind": _KIND, "version": VERSION, **stamp_fields(state)}
        return sealed({**fields, "cursor": str(state.value.cursor), "names": state.value.names, "by": state.value.by})

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[RouteNames]:
        """The state in these bytes."""
        with damage(where, "Restore the object; or remove it, and start the route from the log's beginning."):
            fields = parse_object(data)
            if fields["kind"] == _KIND and isinstance(fields["version"], int) and fields["version"] > VERSION:
                raise UnsupportedVersion(
                    f"{where} is of version {fields['version']}, and this program reads version {VERSION}: upgrade "
                    "strandline."
                )
            fields = decode_checked(bytes(data), _KIND, VERSION)
            names = msgspec.convert(fields["names"], dict[PlainName, Natural])
            by = msgspec.convert(fields["by"], str)
            return read_record(Stamped, fields, value=RouteNames(Cursor.parse(fields["cursor"]), names, by))
