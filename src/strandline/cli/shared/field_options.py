"""The options of commands that append rows of files: the fields or columns that become the parts of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from strandline.bulk.load_files import RecordFields
from strandline.cli.shared.options import flag, option


def _field(text: str) -> Any:
    return option("FIELD", text, rich_help_panel="Rows of files")


@dataclass(frozen=True, slots=True)
class FieldOptions:
    """Which field or column is which part of a record."""

    key: Annotated[str | None, _field("The field or column that is the key.")] = None
    op: Annotated[str | None, _field("The one that says put, delete or purge; by default all are puts.")] = None
    timestamp: Annotated[str | None, _field("The one with the time, and its zone; by default it is now.")] = None
    value: Annotated[str | None, _field("The one that is the value; by default the whole row is.")] = None
    truncate_times: Annotated[
        bool,
        flag(
            "Cut times that are finer than a microsecond; else they are refused.",
            "--truncate-times",
            rich_help_panel="Rows of files",
        ),
    ] = False

    def fields(self, headers: tuple[str, ...] = ()) -> RecordFields:
        """The same, with the fields that become headers."""
        return RecordFields(self.key, self.op, self.timestamp, self.value, headers, self.truncate_times)
