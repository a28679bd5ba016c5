"""The value format of any log: the codec that its identity names."""

from __future__ import annotations

from strandline.formats.json.value_versions import ValueVersion
from strandline.log.lacking import refusal
from strandline.values.contract import Codec


def named_codec(log: object) -> Codec | None:
    """The codec that a log names for its values, in the newest version; None: its values are plain bytes.

    ``Unsupported`` for a log that has no place for it: there the format is unknown, which is not the same.
    """
    if not (hasattr(type(log), "value") or hasattr(type(log), "__getattr__")):
        raise refusal(log, "value")
    found: Codec | None = log.value  # type: ignore[attr-defined]
    return found


def named_versions(log: object) -> tuple[ValueVersion, ...]:
    """All versions of a log's value format; none if values are plain bytes, or the log has no place for a format."""
    found: tuple[ValueVersion, ...] = getattr(log, "value_versions", ())
    return found
