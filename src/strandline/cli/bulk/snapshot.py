"""``strandline snapshot``: the state of every key, built from the log and sealed for stores."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

import strandline as sl
from strandline.bulk.snapshot_building import build_snapshot
from strandline.cli.bulk.export import later
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt
from strandline.cli.shared.common import Until, Workers, connecting
from strandline.cli.shared.options import argument, option
from strandline.cli.shared.pools import task_pool


@connecting
def snapshot(
    place: AnyLogAt,
    folder: Annotated[str, argument("FOLDER", "A folder on this machine, absent or empty.")],
    *,
    kind: Annotated[
        Literal["append-log", "rocksdb"], typer.Option(help="The kind of store that imports it.")
    ] = "append-log",
    upto: Until = None,
    scratch: Annotated[
        str | None, option("URL", "Where tasks keep results that are not sealed yet; by default beside FOLDER.")
    ] = None,
    publish: Annotated[str | None, option("URL", "Also publish it here, for stores that bootstrap.")] = None,
    workers: Workers = None,
) -> None:
    """Seal the newest value of each key, for stores to bootstrap from.

    The log has to have its first record, and every record a key. Killed at any moment and started again it continues
    with the same cursor. On a cluster all executors have to reach --scratch.

    Example: strandline snapshot s3://bucket/orders ./orders-state
    """
    with place.reading() as log:
        pool = task_pool(workers)  # before the bar: starting Spark takes seconds
        with show.meter("reducing records", total=None) as work:
            done = build_snapshot(
                log,
                folder,
                kind=kind,
                upto=upto,
                scratch=scratch,
                publish=None if publish is None else sl.snapshots.Artifacts(publish),
                pool=pool,
                on_progress=work.upto,
            )
        seconds, is_new, end = work.seconds, work.has_moved, log.bounds().next
    size = sum(file.size for file in done.files)
    fields = {
        "cursor": str(done.cursor),
        "next": done.cursor.next,
        "kind": done.kind,
        "files": len(done.files),
        "bytes": size,
        "seconds": round(seconds, 3),
        "new": is_new,
    }
    what = "is" if is_new else "was already"
    text = f"The state at offset {done.cursor.next:,} {what} sealed in {folder} ({show.size(size)}, "
    text += f"{show.seconds(seconds)}){'' if publish is None else f', and published at {publish}'}."
    show.answer(fields, text if is_new else f"{text} {later(done.cursor.next, end)}")
