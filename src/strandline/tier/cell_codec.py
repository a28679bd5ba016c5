"""The stored form of the cells of a cold tier: checked JSON with the cell's stamp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

import msgspec

from strandline.errors import UnsupportedVersion
from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.model.json_values import natural, read_record, stamp_fields
from strandline.model.stamp import Stamped

T = TypeVar("T")

FORMAT_VERSION: Final = 1


@final
@dataclass(frozen=True, slots=True)
class TierCellCodec(Generic[T]):
    """Stores a dataclass as a cell's content; damage is an error, never an empty cell."""

    kind: str
    content: type[T]
    optional: tuple[str, ...] = ()
    """Fields that older cells lack."""

    def encode(self, state: Stamped[T]) -> bytes:
        """The bytes of a state."""
        fields = {"min_reader": FORMAT_VERSION, **msgspec.to_builtins(state.value), **stamp_fields(state)}
        return encode_checked(self.kind, FORMAT_VERSION, fields)

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[T]:
        """The state in these bytes; ``CorruptData`` if they are damaged."""
        with damage(where, "Restore the object."):
            fields = decode_checked(bytes(data), self.kind, FORMAT_VERSION)
            if natural(fields["min_reader"]) > FORMAT_VERSION:
                raise UnsupportedVersion(f"{where} was written by a newer version of strandline: upgrade this one.")
            return read_record(Stamped, fields, value=read_record(self.content, fields, optional=self.optional))
