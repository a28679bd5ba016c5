"""Snapshots of a primary for its replicas."""

from __future__ import annotations

from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.node.lead.bootstrap_snapshots import BootstrapSnapshots
from strandline.node.node_folder import NodeFolder
from strandline.node.replicate.bootstrap import KIND
from tests.ingestion.sources import changes


def offer(folder, log):
    snapshots = BootstrapSnapshots(folder, log)
    return snapshots.begin("b", KIND)


def test_a_snapshot_of_a_history_that_the_primary_has_lost_is_not_offered_again(tmp_path):
    data = tmp_path / "data"
    with NodeFolder.open(str(tmp_path / "node"), "a") as folder:
        with WalLog.open(data) as log:
            log.append_batch(changes(4), term=1).result()
            log.append_batch(changes(1, 4), term=1).result()
            offered = offer(folder, log)
            assert offer(folder, log) == offered, "after a restart"
        rewind(str(data), 4, quarantine=str(tmp_path / "aside"))
        with WalLog.open(data) as log:
            log.append_batch(changes(1, 30), term=2).result()
            assert offer(folder, log) != offered
