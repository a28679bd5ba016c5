"""Hostile input gives a value or an error of ours: no crash, no hang, nothing else raised, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fuzz.broken import TRIGGER
from tests.fuzz.places import PLACES
from tests.fuzz.registry import GROUPS, find, named
from tests.fuzz.runner import ROOT, fuzz
from tests.fuzz.targets import case
from tests.matrix_cases import sampled

CASES = {"formats": 40, "values": 40, "bodies": 40, "extremes": 40, "places": 4, "flight": 10, "commands": 3}
"""Of each target of a group."""
FEW = {"command-processes": 2}
"""Of targets that take long."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", sampled(40))
@pytest.mark.parametrize("group", GROUPS)
def test_hostile_input_is_refused_and_nothing_worse_happens(group: str, share: int) -> None:
    names = named([group])
    for cases, some in (
        (max(1, CASES[group] // share), [name for name in names if name not in FEW]),
        *((max(1, FEW[name] // share), [name]) for name in names if name in FEW),
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


@pytest.mark.matrix
def test_damage_is_mostly_detected_by_the_checksum() -> None:
    report = fuzz(["batch-zstd", "head", "segment", "slot"], seed=2, cases=150, seconds=1800, quiet=True)
    for name, seen in report.outcomes.items():
        assert {"fine", "CorruptData"} <= seen.keys() <= {"fine", "CorruptData", "UnsupportedVersion"}, name


@pytest.mark.matrix
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
    (found,) = report.finds
    assert what in found.what
    assert TRIGGER in found.data
    assert found.kept.read_bytes() == found.data
    assert f"--only {name} --seed {found.seed} --cases 1" in str(found)
    assert "broken-not" in report.outcomes, "the others are tried all the same"
    found.kept.unlink()


def test_an_input_that_raises_is_made_as_small_as_it_can_be() -> None:
    (found,) = fuzz(["broken-raises"], seed=0, cases=100, seconds=1800, quiet=True).finds
    assert found.data == TRIGGER
    found.kept.unlink()


def test_a_find_is_repeated_from_its_seed_and_from_its_file() -> None:
    (found,) = fuzz(["broken-raises"], seed=0, cases=100, seconds=1800, quiet=True).finds
    for way in (["--seed", str(found.seed), "--cases", "1"], ["--input", str(found.kept)]):
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--only", "broken-raises", *way],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "OverflowError" in done.stdout
    found.kept.unlink()


@pytest.mark.matrix
def test_commands_are_tried_on_forged_places_of_the_kind_that_they_are_for() -> None:
    cases = [json.loads(case(find("command-line"), seed)) for seed in range(400)]
    meant = [told for told in cases if told["forged"]]
    assert len(meant) > len(cases) / 4
    files = {place.name: place.files for place in PLACES}
    for told in meant:
        for name, forged in told["forged"].items():
            assert any(f"@/{name}" in argument for argument in told["arguments"]), "it is what the command is given"
            assert bytes.fromhex(forged).split(b"\0")[1].decode() in files[name]
    tried = {" ".join(told["arguments"][:2]) for told in meant}
    assert {"segments list", "tier run", "wal repair", "slots list"} <= tried
