"""Validation of Arrow batches from another process; every entrance uses it."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from strandline.errors import CorruptData, StrandlineError

RECORD_BYTES: Final = 24
"""A record takes at least so many bytes in a log, whatever it took on the way: a column of nulls takes none there."""


def admit_batch(batch: object, what: str, *, wrong: type[StrandlineError] = CorruptData) -> pa.RecordBatch:
    """The batch, every byte of it validated; raises ``wrong`` for any other.

    Nothing may look at a batch from outside before this: to measure, slice, compare or encode one whose offsets lead
    out of its buffers ends the process.
    """
    if not isinstance(batch, pa.RecordBatch):
        raise wrong(f"{what} came without an Arrow batch.")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise wrong(f"{what} is damaged: {str(error).splitlines()[0][:200]}.") from error
    return batch


def memory_of(batch: pa.RecordBatch) -> int:
    """How many bytes an admitted batch takes as records of a log, which its buffers need not have taken."""
    size: int = batch.nbytes
    return max(size, RECORD_BYTES * int(batch.num_rows))
