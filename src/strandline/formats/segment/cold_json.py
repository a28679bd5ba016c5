"""What says where a log's cold tier is (``cold.json``)."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.json.checked import decode_checked, encode_checked
from strandline.model.cold import ColdTier
from strandline.model.json_values import natural, text
from strandline.model.stamp import OpId, Stamped

FORMAT_VERSION: Final = 1
_KIND: Final = "strandline-cold"


class ColdCodec:
    """A cold tier as a cell's content."""

    def encode(self, state: Stamped[ColdTier]) -> bytes:
        """The bytes of a state."""
        cold = state.value
        fields: dict[str, Any] = {
            "min_reader": FORMAT_VERSION,
            "log_id": str(cold.log_id),
            "store": cold.store,
            "events": cold.events,
            "partitions": cold.partitions,
            "name": cold.name,
            "start": cold.start,
            "gone": cold.gone,
            "announced": cold.announced,
            "revision": state.revision,
            "recent": [op.hex for op in state.recent],
        }
        return encode_checked(_KIND, FORMAT_VERSION, fields)

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[ColdTier]:
        """The state in these bytes; damage is an error, never "no cold tier"."""
        try:
            fields = decode_checked(bytes(data), _KIND, FORMAT_VERSION)
            if natural(fields["min_reader"]) > FORMAT_VERSION:
                raise UnsupportedVersion(f"{where} was written by a newer version of strandline: upgrade this one.")
            cold = ColdTier(
                UUID(text(fields["log_id"])),
                text(fields["store"]),
                text(fields["events"]),
                natural(fields["partitions"]),
                text(fields["name"]),
                natural(fields["start"]),
                natural(fields["gone"]),
                natural(fields["announced"]),
            )
            recent = tuple(OpId(UUID(hex=op)) for op in fields["recent"])
            return Stamped(cold, natural(fields["revision"]), recent)
        except (ValueError, TypeError, KeyError, AttributeError, InvalidInput) as error:
            raise CorruptData(f"{where} is damaged: {error}. Restore the object.") from error
