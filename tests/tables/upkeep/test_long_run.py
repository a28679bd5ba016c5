"""Upkeep of a table with a thousand commits, as often as tables have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.tables.files.upkeep import FEW, TRIM_EVERY
from strandline.testing.sinks import LOG
from tests.tables.upkeep.kept_table import KeptDelta, later


@pytest.mark.matrix
def test_a_thousand_commits_leave_few_files_and_few_entries(tmp_path: Path) -> None:
    delta = KeptDelta(tmp_path)
    sink = delta.sink(env=later())
    sink.resume(LOG)
    for upto in range(50, 1001, 50):
        delta.apply(sink, upto)
        # Of one class that has not 32 files yet, of the joins of its joins, and since the last look.
        assert sink.size().files <= 2 * FEW
        # Replaced since the last trim, and those of the versions behind the checkpoint that is kept.
        assert len(delta.data_files()) <= 4 * TRIM_EVERY
        assert len(delta.entries()) <= 2 * TRIM_EVERY
    assert sink.upkeep.failures == 0
    assert sink.upkeep.joined >= 900
    assert sink.upkeep.files >= 800
    assert sink.upkeep.entries >= 800
    delta.check(1000)
    delta.check_versions()
