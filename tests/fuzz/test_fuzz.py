"""Hostile input gives a value or an error of ours: no crash, no hang, nothing else raised, in bounded memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz.broken import TRIGGER
from tests.fuzz.registry import GROUPS, named
from tests.fuzz.runner import ROOT, fuzz

CASES = {"formats": 100, "places": 12, "flight": 25, "commands": 20}
"""Of each target of a group."""
FEW = {"command-processes": 2}
"""Of targets that take long."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GROUPS)
def test_hostile_input_is_refused_and_nothing_worse_happens(group: str) -> None:
    names = named([group])
    for cases, some in (
        (CASES[group], [name for name in names if name not in FEW]),
        *((FEW[name], [name]) for name in names if name in FEW),
    ):
        report = fuzz(some, seed=1, cases=cases, seconds=1800, quiet=True)
        assert not report.finds, "\n".join(map(str, report.finds))
        assert list(report.outcomes) == some


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_hostile_input_for_ten_minutes(group: str) -> None:
    report = fuzz(named([group]), seed=1_000_000, seconds=600, quiet=True)
    assert not report.finds, "\n".join(map(str, report.finds))


def test_what_is_damaged_is_mostly_met_behind_the_checksum() -> None:
    report = fuzz(["batch-zstd", "head", "segment", "slot"], seed=2, cases=150, seconds=1800, quiet=True)
    for name, seen in report.outcomes.items():
        assert {"fine", "CorruptData"} <= seen.keys() <= {"fine", "CorruptData", "UnsupportedVersion"}, name


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("broken-raises", "OverflowError"),
        ("broken-crashes", "the process ended by SIGSEGV"),
        ("broken-hangs", "it hung"),
        ("broken-devours", "MemoryError"),
    ],
)
def test_a_target_that_is_broken_is_found_with_the_input_that_shows_it(name: str, what: str) -> None:
    report = fuzz([name, "broken-not"], seed=0, cases=100, seconds=1800, quiet=True)
    (find,) = report.finds
    assert what in find.what
    assert TRIGGER in find.data
    assert find.kept.read_bytes() == find.data
    assert f"--only {name} --seed {find.seed} --cases 1" in str(find)
    assert "broken-not" in report.outcomes, "the others are tried all the same"
    find.kept.unlink()


def test_an_input_that_raises_is_made_as_small_as_it_can_be() -> None:
    (find,) = fuzz(["broken-raises"], seed=0, cases=100, seconds=1800, quiet=True).finds
    assert find.data == TRIGGER
    find.kept.unlink()


def test_a_find_is_repeated_from_its_seed_and_from_its_file() -> None:
    (find,) = fuzz(["broken-raises"], seed=0, cases=100, seconds=1800, quiet=True).finds
    for way in (["--seed", str(find.seed), "--cases", "1"], ["--input", str(find.kept)]):
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--only", "broken-raises", *way],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "OverflowError" in done.stdout
    find.kept.unlink()
