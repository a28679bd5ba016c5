"""``strandline load``: files of JSON lines, CSV, Parquet or Arrow into an object log, exactly once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from strandline.bulk.loading import load as load_files
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import object_log_at
from strandline.cli.shared.common import Create, Workers, guarded
from strandline.cli.shared.field_options import FieldOptions
from strandline.cli.shared.options import argument, option
from strandline.cli.shared.pools import task_pool


@guarded
def load(
    places: Annotated[
        list[str], argument("SOURCE... URL", "Files or folders to load, and last the object log to append to.")
    ],
    *,
    job: Annotated[str, option("NAME", "Names what is loaded: a job that is in the log is done.")],
    format: Annotated[  # noqa: A002 - the field's own word
        Literal["jsonl", "csv", "parquet", "arrow"] | None,
        option("FORMAT", "The format of the files: jsonl, csv, parquet or arrow; by default their names say it."),
    ] = None,
    fields: FieldOptions,
    workers: Workers = None,
    create: Create = False,
) -> None:
    """Append the rows of files to an object log: all of them or none.

    Each once, files by name and rows in order. Killed at any moment and started again within a day it continues. A job
    that is in the log is not loaded again; files that changed since it began are refused. Without --value a row is a
    JSON object, of JSON lines the line itself; a log that names a format of its values gets that.

    Example: strandline load ./2026-11 s3://bucket/orders --job november --key id
    """
    *sources, url = places
    if not sources:
        raise typer.BadParameter("Name what is loaded, and then the log: strandline load ./orders s3://bucket/orders.")
    log = object_log_at(url, create=create)
    pool = task_pool(workers)
    with show.meter("loading bytes", total=None) as work:
        done = load_files(sources, log, job=job, format=format, **asdict(fields), pool=pool, on_progress=work.upto)
    answer = {
        "job": done.job,
        "files": done.files,
        "records": done.records,
        "first": done.first,
        "next": None if done.first is None else done.first + done.records,
        "seconds": round(work.seconds, 3),
    }
    files = show.counted(done.files, "file")
    text = f"The log has job {job}: there was no record in {files}."
    if done.first is not None:
        text = (
            f"The log has job {job}: {show.counted(done.records, 'record')} of {files}, offsets {done.first:,} to "
            f"{done.first + done.records - 1:,} ({show.seconds(work.seconds)})."
        )
    show.answer(answer, text)
