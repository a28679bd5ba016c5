"""Snapshots: sealed folders, their publication in an object store, and new stores bootstrapped from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.model.snapshot import Snapshot as Snapshot
    from strandline.snapshots.artifacts import Artifacts as Artifacts
    from strandline.snapshots.bootstrapping import bootstrap as bootstrap
    from strandline.snapshots.sealed import newest_snapshot as newest_snapshot
    from strandline.snapshots.sealed import next_number as next_number
    from strandline.snapshots.sealed import snapshot_folder as snapshot_folder
    from strandline.snapshots.sealed import trim as trim

__getattr__, __dir__, __all__ = lazy(__spec__)
