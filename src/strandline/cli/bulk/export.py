"""``strandline export``: a range of a log as Parquet or JSON lines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from strandline.bulk.exporting import ExportManifest
from strandline.bulk.exporting import export as export_range
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt
from strandline.cli.shared.common import Until, Workers, beginning, connecting
from strandline.cli.shared.options import argument
from strandline.cli.shared.pools import task_pool


@connecting
def export(
    place: AnyLogAt,
    target: Annotated[str, argument("TARGET", "A folder, file://, s3://, gs:// or az://.")],
    *,
    start: Annotated[Any, beginning("Where it begins: retained, beginning, an offset, a time.")] = "retained",
    upto: Until = None,
    format: Annotated[  # noqa: A002
        Literal["parquet", "jsonl"], typer.Option(help="Parquet, or a JSON document per line.")
    ] = "parquet",
    workers: Workers = None,
) -> None:
    """Write the records of a range into files, each once, in order.

    A manifest lists the files. Killed at any moment and started again it writes what is missing. On a cluster:
    'strandline spark export'.

    Example: strandline export s3://bucket/orders ./orders-export --format jsonl
    """
    with place.reading() as log:
        pool = task_pool(workers)  # before the bar: starting Spark takes seconds
        with show.meter("exporting", total=None) as work:
            done = export_range(log, target, since=start, upto=upto, format=format, pool=pool, on_progress=work.upto)
        seconds, is_new, end = work.seconds, work.has_moved, log.bounds().next
    fields = {
        "first": done.since,
        "next": done.upto,
        "records": done.records,
        "parts": len(done.parts),
        "bytes": sum(part.bytes for part in done.parts),
        "seconds": round(seconds, 3),
        "new": is_new,
    }
    text = sentence(done, target, f"exported in {show.seconds(seconds)}" if is_new else "were exported before")
    show.answer(fields, text if is_new else f"{text} {later(done.upto, end)}")


def sentence(done: ExportManifest, target: str, what: str) -> str:
    """One sentence about the export."""
    if not done.records:
        return f"There was nothing to export: {target} has a manifest without parts."
    size = show.size(sum(part.bytes for part in done.parts))
    return (
        f"{show.counted(done.records, 'record')} {what}: offsets {done.since:,} to "
        f"{done.upto - 1:,} in {show.counted(len(done.parts), 'file')} ({size}), listed in {target}/manifest.json."
    )


def later(upto: int, end: int) -> str:
    """The sentence after that of a job that an earlier call has finished, up to an offset.

    >>> later(5, 5), later(5, 8)
    ('Nothing was written.', 'Nothing was written; the log ends at 8 now: name another folder for what came since.')
    """
    more = f"; the log ends at {end:,} now: name another folder for what came since" if end > upto else ""
    return f"Nothing was written{more}."
