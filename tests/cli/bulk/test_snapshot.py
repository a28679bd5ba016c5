"""Building a snapshot from the shell; what it holds is tried in tests/bulk."""

from __future__ import annotations

import json
from pathlib import Path

import strandline as sl
from tests.cli.conftest import Run


def test_a_snapshot_is_sealed_published_and_said(run: Run, log: str, tmp_path: Path) -> None:
    opened = sl.open(log, create=True)
    with opened.producer() as producer:
        for number in range(10):
            producer.append(key=b"k%d" % (number % 4), value=b"v%d" % number)
    done = run("snapshot", log, str(tmp_path / "sealed"), "--publish", f"file://{tmp_path}/published", "--workers", "2")
    assert done.exit_code == 0, done.output
    assert "The state at offset 10 is sealed in" in done.stdout
    assert "and published at" in done.stdout
    again = json.loads(run("snapshot", log, str(tmp_path / "sealed"), "--json").stdout)
    assert (again["next"], again["kind"], again["files"], again["new"]) == (10, "append-log", 1, False)
    with opened.producer() as producer:
        producer.append(key=b"k4", value=b"later")
    old = run("snapshot", log, str(tmp_path / "sealed")).stdout
    assert "The state at offset 10 was already sealed in" in old
    assert "Nothing was written; the log ends at 11 now: name another folder" in old
    published = sl.snapshots.Artifacts(f"file://{tmp_path}/published")
    with sl.snapshots.bootstrap(published, tmp_path / "store", sl.followers.AppendLogStore) as store:
        assert dict(store.range()) == {b"k0": b"v8", b"k1": b"v9", b"k2": b"v6", b"k3": b"v7"}
