"""The value format of any log: the codec that its identity names."""

from __future__ import annotations

from typing import Final, NoReturn

from strandline.errors import UnsupportedCall
from strandline.formats.json.value_versions import ValueVersion
from strandline.values.contract import Codec

NO_FORMAT: Final = (
    "it records no value format. A queue of version 1 has no place for it, and replicas of a node would not know its "
    "changes after a failover. Give the codec to producers, sinks and readers."
)


class WithoutFormat:
    """Base class of logs that have no place for a value format: there it is unknown, which is not the same as none."""

    @property
    def value(self) -> NoReturn:
        """``Unsupported``."""
        raise UnsupportedCall(f"{self!r} has no value format: {NO_FORMAT}")

    value_versions = evolve_value = value


def named_codec(log: object) -> Codec | None:
    """The codec that a log names for its values, in the newest version; None: its values are plain bytes.

    ``Unsupported`` for a log that has no place for it: there the format is unknown, which is not the same.
    """
    found: Codec | None = log.value  # type: ignore[attr-defined]
    return found


def named_versions(log: object) -> tuple[ValueVersion, ...]:
    """All versions of a log's value format; none if values are plain bytes, or the log has no place for a format."""
    found: tuple[ValueVersion, ...] = getattr(log, "value_versions", ())
    return found
