"""The demo as it is run, with Spark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Run, Start

pytestmark = pytest.mark.spark


def left_over(mark: Path) -> list[psutil.Process]:
    """Processes that still know a folder by name."""
    known = psutil.process_iter(["cmdline"])
    return [process for process in known if any(str(mark) in part for part in process.info["cmdline"] or ())]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_demo_is_exact_while_the_naive_twin_is_not(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    command = [sys.executable, "-m", "strandline.cli", "demo", "--records", "50000"]
    done = subprocess.run(
        [*command, "--dir", str(home), "--json"], capture_output=True, text=True, check=False, timeout=550, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["verdict"] == "EXACT"
    assert facts["naive_wrong"] is True
    assert facts["results"]["naive"]["lost"] > 0
    assert facts["results"]["naive"]["doubled"] > 0
    assert facts["results"]["changes"]["rows"] == 50_000
    assert facts["results"]["orders"]["rows"] > 0
    assert [event["kind"] for event in facts["events"]].count("kill") == 2
    pinning = [slot["slot"] for slot in facts["lag"]["slots"] if slot["pins_floor"]]
    assert pinning == ["stalled-report"]
    assert "EXACT" in Path(facts["report"]).read_text()
    assert left_over(home) == []
    assert list(tmp_path.iterdir()) == [home], "it writes into a folder of its own"


@pytest.mark.matrix
@pytest.mark.parametrize("asked", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_a_demo_that_is_stopped_leaves_no_process_and_no_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start("demo", "--records", 5000)
    assert process.stdout is not None
    assert any(
        "  log " in line and "  late " in line for line in process.stdout
    )  # Spark's process has been started by now
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(asked)
    process.communicate(timeout=600)
    assert process.returncode == 130
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert left_over(tmp_path) == []
    assert list(tmp_path.glob("strandline-demo-*")) == []


@pytest.mark.matrix
def test_a_demo_without_java_says_so_in_one_sentence(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    process = start("demo", "--records", 5000, "--json")
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (1, "")
    assert "Java 17 or 21" in err
    assert len(err.splitlines()) == 1
    (home,) = tmp_path.glob("strandline-demo-*")
    (told,) = [path for path in home.rglob("*") if path.is_file() and str(path) in err]
    assert told.read_text(), "where it is said, it can be read"
    assert sorted(path.name for path in home.iterdir()) == ["output"], "and nothing else is left"


def test_impossible_options_are_a_usage_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    assert run("demo", "--dir", tmp_path).exit_code == 2
    assert run("demo", "--records", 2).exit_code == 2
