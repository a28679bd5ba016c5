"""The history of an ingested source: proves that a source still is the one of which a target holds a copy."""

from __future__ import annotations

import pyarrow as pa

from strandline.errors import Diverged
from strandline.ingestion.streams import MessageStream
from strandline.log.contract import Log, LogReading
from strandline.log.read.erased_records import same_unless_erased
from strandline.log.read.span_tasks import last_record
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import WriterState


def check_history(source: LogReading, target: LogReading, last: WriterState) -> None:
    """``Diverged`` if the source has another history than the target holds of it up to its last append.

    Proven by the term and fingerprint that the target has stored with that append. A target that an older version has
    written has none, and a source may have no fingerprint of a record in its cold tier: then the last records are
    compared. Raises what ``plan`` of the source raises, ``CursorExpired`` among it.
    """
    if last.proof is not None:
        try:
            source.plan(last.proof.cursor(source.log_id), Limit(batches=1))
        except Diverged as error:
            raise Diverged(
                f"The source has another history than the one that {target!r} holds of it: at offset "
                f"{last.proof.next} its end, term or batch is another one. The source was restored from a copy, "
                "promoted by force or created again. Ingest it into another log."
            ) from error
        if isinstance(source, MessageStream) or source.cursor_at(last.proof.next).fingerprint is not None:
            return
    there, here = last_record(target, last.first + last.count), last_record(source, last.number)
    if there is None or here is None:
        return
    one, other = pa.Table.from_batches([there]), pa.Table.from_batches([here])
    if not same_unless_erased(one, other) and not same_unless_erased(other, one):
        raise Diverged(
            f"The last record that {target!r} holds of the source is not the one at offset {last.number - 1} of the "
            "source: the source was restored from a copy, or created again, and has grown differently since. Ingest "
            "it into another log."
        )


def proving_end(source: Log) -> Cursor:
    """The end of a source as of now, with the fingerprint that proves all before it, if the source has one there."""
    end = source.end()
    if end.fingerprint is not None or isinstance(source, MessageStream):  # each read of a stream proves itself
        return end
    return source.cursor_at(end.next)
