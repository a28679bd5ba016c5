"""Bulk jobs over a whole log or a range of it: the same tasks in threads of this process, or on Spark's executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.bulk.exporting import ExportManifest as ExportManifest
    from strandline.bulk.exporting import export as export
    from strandline.bulk.ingesting import ingest as ingest
    from strandline.bulk.loading import Loaded as Loaded
    from strandline.bulk.loading import load as load
    from strandline.bulk.snapshot_building import build_snapshot as build_snapshot
    from strandline.bulk.verifying import verify as verify
    from strandline.log.findings import Verification as Verification
    from strandline.storage.task_pool import TaskPool as TaskPool
    from strandline.storage.task_pool import ThreadPool as ThreadPool

_get, __dir__, __all__ = lazy(__spec__)


def __getattr__(name: str) -> Any:
    return _get(name)
