"""Bulk jobs over a whole log or a range of it: the same tasks in threads of this process, or on Spark's executors.

Also what follows from a copy of a log: cursors are translated, and tables moved to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.bulk.deleting import Deletion as Deletion
    from strandline.bulk.deleting import delete as delete
    from strandline.bulk.exporting import ExportManifest as ExportManifest
    from strandline.bulk.exporting import export as export
    from strandline.bulk.inferring import infer as infer
    from strandline.bulk.ingesting import ingest as ingest
    from strandline.bulk.loading import Loaded as Loaded
    from strandline.bulk.loading import load as load
    from strandline.bulk.snapshot_building import build_snapshot as build_snapshot
    from strandline.bulk.verifying import verify as verify
    from strandline.ingestion.table_move import move_table as move_table
    from strandline.ingestion.translation import translate_cursor as translate_cursor
    from strandline.log.findings import Verification as Verification
    from strandline.storage.task_pool import TaskPool as TaskPool
    from strandline.storage.task_pool import ThreadPool as ThreadPool
    from strandline.values.proposal import SchemaProposal as SchemaProposal

__getattr__, __dir__, __all__ = lazy(__spec__)
