"""``cold.json``: the address of a log's cold tier."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.json.checked import decode_checked, encode_checked
from strandline.model.json_values import natural, read_record, stamp_fields
from strandline.model.segments import ColdTier
from strandline.model.stamp import Stamped

FORMAT_VERSION: Final = 1
_KIND: Final = "strandline-cold"


class ColdCodec:
    """A cold tier as a cell's content."""

    def encode(self, state: Stamped[ColdTier]) -> bytes:
        """The bytes of a state."""
        cold = {**asdict(state.value), "log_id": str(state.value.log_id)}
        return encode_checked(_KIND, FORMAT_VERSION, {"min_reader": FORMAT_VERSION, **cold, **stamp_fields(state)})

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[ColdTier]:
        """The state in these bytes; damage is an error, never "no cold tier"."""
        try:
            fields = decode_checked(bytes(data), _KIND, FORMAT_VERSION)
            if natural(fields["min_reader"]) > FORMAT_VERSION:
                raise UnsupportedVersion(f"{where} was written by a newer version of strandline: upgrade this one.")
            return read_record(Stamped, fields, value=read_record(ColdTier, fields))
        except (ValueError, KeyError, InvalidInput) as error:
            raise CorruptData(f"{where} is damaged: {error}. Restore the object.") from error
