"""Runs all benchmarks, or those named; prints a table, writes ``results.json``, fails if a goal was missed."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import (
    append,
    backlog,
    bulk,
    cold,
    contention,
    decode,
    ingest,
    keyed,
    layouts,
    memory,
    metadata,
    produce,
    remote,
    replication,
    routes,
    scale,
    segments,
    serving,
    spark_cold,
    spark_memory,
    spark_pipeline,
    spark_read,
    spark_tables,
    spark_write,
    tiered_node,
    trim,
    upkeep,
    wal,
)
from benchmarks.harness import Result, save, show

BENCHMARKS: dict[str, Callable[[], list[Result]]] = {
    "append_batch": append.batches,
    "append_single": append.singles,
    "decode": decode.run,
    "backlog": backlog.run,
    "bulk": bulk.run,
    "cold": cold.run,
    "trim": trim.run,
    "contention": contention.run,
    "ingest": ingest.run,
    "keyed": keyed.run,
    "layouts": layouts.run,
    "memory": memory.run,
    "metadata": metadata.run,
    "produce": produce.calls,
    "remote": remote.run,
    "replication": replication.run,
    "scale": scale.run,
    "routes": routes.run,
    "segments": segments.run,
    "serving": serving.run,
    "spark_cold": spark_cold.run,
    "spark_memory": spark_memory.run,
    "spark_pipeline": spark_pipeline.run,
    "spark_read": spark_read.run,
    "spark_tables": spark_tables.run,
    "spark_write": spark_write.run,
    "tiered_node": tiered_node.run,
    "upkeep": upkeep.run,
    "wal": wal.run,
}


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"There is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    results: list[Result] = []
    for name in names:
        print(f"… {name}", file=sys.stderr, flush=True)
        found = BENCHMARKS[name]()
        show(found)
        save(found)
        results += found
    missed = [result.name for result in results if result.met is False]
    print(f"{len(results)} numbers, {len(missed)} short of their goal{': ' + ', '.join(missed) if missed else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
