"""Records that cannot become rows: how many of them a commit may have, and the errors of one that has too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from strandline.errors import BadRecord, InvalidInput
from strandline.model.arguments import shown
from strandline.model.cursor import batch_fingerprint
from strandline.model.records import READ_SCHEMA
from strandline.model.sink import without_key
from strandline.tables.written import LetterId, Written

NO_KEY: Final = "It has no key, and the table keeps its rows by key."
"""The reason of a record without a key in a keyed table."""


@dataclass(slots=True)
class BadShare:
    """The share of a commit's records that may be bad (``max_bad_share``), and how many a sink has set aside."""

    most: float = 1.0
    found: int = 0

    @classmethod
    def of(cls, value: Any) -> BadShare:
        """``InvalidInput`` unless it is between 0 and 1."""
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return cls(float(value))
        raise InvalidInput(f"max_bad_share is between 0 and 1, not {shown(value)}.")

    def check(self, bad: int, records: int, example: str) -> None:
        """``BadRecord`` if there are more; ``example`` is the offset and the reason of one of them."""
        if bad and bad / max(1, records) > self.most:  # not bad > most * records: 0.29 * 100 is less than 29
            raise BadRecord(
                f"{bad:,} of {records:,} records cannot become rows, which is more than the share of {self.most:g} "
                f"that max_bad_share allows (first: {example}). Nothing was applied: correct the schema, or allow more."
            )

    def check_written(self, written: Sequence[Written], records: int) -> None:
        """``BadRecord`` if the workers report more bad records than allowed, of a range with ``records`` offsets."""
        bad = sum(one.bad_records for one in written)
        records += sum(one.shared - one.others for one in written)
        self.check(bad, records, next((one.first_bad for one in written if one.first_bad), ""))


def letter_ids(letters: pa.Table) -> list[LetterId]:
    """What distinguishes each letter from any other record at its offset, as in another history of the log."""
    records = letters.select(READ_SCHEMA.names).cast(READ_SCHEMA)
    times = records.column("timestamp").cast(pa.int64())  # Python has no times beyond the year 9999
    records = records.set_column(records.column_names.index("timestamp"), "timestamp", times)
    return [(row["offset"], batch_fingerprint(*row.values())) for row in records.to_pylist()]


def first_bad(letters: pa.Table) -> str:
    """Offset and reason of the first bad record; empty if there is none."""
    if not letters.num_rows:
        return ""
    return f"offset {letters.column('offset')[0].as_py()}: {letters.column('reason')[0].as_py()}"


def refused(bad: pa.Table) -> BadRecord:
    """The error for bad records without a place to set them aside."""
    first = bad.column("offset")[0].as_py()
    if bad.column("reason")[0].as_py() == NO_KEY and not bad.column("key")[0].is_valid:
        return without_key(first)
    return BadRecord(
        f"The record at offset {first} cannot become a row: {bad.column('reason')[0].as_py()} Nothing was applied; "
        "set such records aside as dead letters, or correct the schema."
    )
