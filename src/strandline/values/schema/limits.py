"""Limits on schemas that others may have written."""

from __future__ import annotations

from typing import Final

from strandline.errors import SchemaRefused

MAX_DEPTH: Final = 32
"""Limit on structs, lists and maps inside each other."""
MAX_FIELDS: Final = 10_000
"""Limit on the fields of a schema that may name types."""


class FieldCount:
    """How many fields a schema has when it is written out: types that name others make millions of a few lines."""

    def __init__(self) -> None:
        self.fields = 0

    def add(self, fields: int = 1) -> None:
        """Count some more; ``SchemaRefused`` if there are too many."""
        self.fields += fields
        if self.fields > MAX_FIELDS:
            raise SchemaRefused(
                f"The schema has more than {MAX_FIELDS:,} fields, counting those of a type wherever it is named: use "
                "fewer."
            )
