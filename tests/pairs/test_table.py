"""The table of pairs in docs/architecture.md is the one that the tests print, and every cell has a test."""

from __future__ import annotations

import tests.pairs.test_pairs
import tests.spark.datasource.test_every_log  # noqa: F401 - its rows
from tests.pairs.log_kinds import KINDS
from tests.pairs.table import ROWS, on_the_page, table


def test_the_page_has_the_table_that_the_tests_print():
    assert on_the_page() == table(), "write it again: python -m tests.pairs"


def test_every_cell_has_a_test(request):
    """Counted among what pytest would run, not among what the table says."""
    for row in ROWS.values():
        module = __import__(row.module, fromlist=[row.test])
        (mark,) = [mark for mark in getattr(module, row.test).pytestmark if mark.name == "parametrize"]
        assert [each.id for each in mark.args[1]] == list(KINDS), row.test


def test_a_row_runs_by_default_on_at_least_one_kind():
    for row in ROWS.values():
        module = __import__(row.module, fromlist=[row.test])
        (mark,) = [mark for mark in getattr(module, row.test).pytestmark if mark.name == "parametrize"]
        assert any(not each.marks for each in mark.args[1]), row.test
