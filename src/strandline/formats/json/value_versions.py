"""Value format of a log, with its versions, as part of the log's identity.

The formats themselves are not known here: a log written by a newer release may name one that this release lacks, and is
read all the same, as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypedDict

import msgspec

_MOST: Final = 10_000
"""Limit on versions: each is read whenever the log is opened."""


class _StoredVersion(TypedDict):
    version: int
    format: str
    schema: dict[str, Any]


_StoredVersions: Final = Annotated[list[_StoredVersion], msgspec.Meta(max_length=_MOST)]


@dataclass(frozen=True, slots=True)
class ValueVersion:
    """One version of a log's value format: its number from 1 on, the format's name, its schema as JSON text."""

    number: int
    format: str
    schema: str

    @classmethod
    def of(cls, number: int, name: str, schema: Mapping[str, Any]) -> ValueVersion:
        """A version, with its schema in canonical form: equal schemas are equal texts."""
        return cls(number, name, json.dumps(schema, sort_keys=True, separators=(",", ":")))

    def is_same_format(self, other: ValueVersion) -> bool:
        """Whether both describe the same format and schema, whatever their numbers."""
        return (self.format, self.schema) == (other.format, other.schema)


def version_fields(versions: Sequence[ValueVersion]) -> dict[str, Any]:
    """The part of ``log.json`` that describes values; nothing for a log of plain bytes."""
    if not versions:
        return {}
    return {
        "values": [
            {"version": version.number, "format": version.format, "schema": json.loads(version.schema)}
            for version in versions
        ]
    }


def read_versions(fields: Mapping[str, Any]) -> tuple[ValueVersion, ...]:
    """The versions in ``log.json``; formats may be unknown. Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    found = msgspec.convert(fields.get("values", []), _StoredVersions)
    try:
        versions = tuple(ValueVersion.of(one["version"], one["format"], one["schema"]) for one in found)
    except RecursionError as error:
        raise ValueError("a schema nests too deep") from error
    if [version.number for version in versions] != list(range(1, len(versions) + 1)):
        raise ValueError("the versions of 'values' are not numbered from 1")
    return versions
