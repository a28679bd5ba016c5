"""The pytest plugin, as installing the package registers it, and the example project that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from strandline import testing

HOME = Path(__file__).parents[2]
PROJECT = HOME / "examples" / "tested_sink"


IS_INSTALLED = any(found.name == "strandline" for found in entry_points(group="pytest11"))
PLUGIN = () if IS_INSTALLED else ("-p", "strandline.testing.plugin")


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, with the plugin; it sees nothing of the tests here."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": str(HOME / "src")},
    )  # fmt: skip


def test_every_name_of_the_front_is_there() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name


def test_the_tests_of_the_example_project_pass() -> None:
    done = pytest_run(PROJECT)
    assert done.returncode == 0, done.stdout
    assert "14 passed" in done.stdout


@pytest.mark.matrix
def test_the_tests_of_the_example_project_fail_if_its_sink_is_broken(tmp_path: Path) -> None:
    code = (PROJECT / "order_search.py").read_text()
    both = "self.store_rows(rest)\n                self.store_cursor(upto)"
    assert both in code
    broken = "self.store_cursor(upto)\n                self.db.commit()\n                self.store_rows(rest)"
    (tmp_path / "order_search.py").write_text(code.replace(both, broken))
    (tmp_path / "test_it.py").write_text((PROJECT / "tests" / "test_order_search.py").read_text())
    done = pytest_run(tmp_path)
    assert "FAILED test_it.py::test_a_crash_at_any_step_leaves_each_order_right" in done.stdout


def test_the_fixtures_are_listed_with_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("")
    shown = pytest_run(tmp_path, "--fixtures").stdout
    for name in ("strandline_log", "faulty_store", "manual_clock", "simulated_disk"):
        assert f"\n{name} -- " in shown
        assert "no docstring" not in shown.split(f"\n{name} -- ")[1].split("\n\n")[0]


@pytest.mark.matrix
def test_the_fixtures_work_together_and_are_new_for_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import pytest
import strandline as sl
from strandline import testing


@pytest.mark.parametrize("run", [1, 2])
def test_the_log_is_in_the_store(strandline_log, faulty_store, run):
    assert strandline_log.end().next == 0
    with strandline_log.producer() as producer:
        faulty_store.fail_next("put_if", after=True)
        producer.append(value=b"v").result(60)
    assert [operation.outcome for operation in faulty_store.log].count("after") == 1
    sink = testing.MemorySink()
    sl.follow(strandline_log, sink, upto="end")
    assert sink.rows() == [(0, None, b"v")]


def test_the_clock_and_the_disk(manual_clock, simulated_disk):
    manual_clock.sleep(3600)
    simulated_disk.make_folders("/a")
    simulated_disk.write_new("/a/b", [b"bytes"])
    simulated_disk.crash(testing.CrashMode.NOTHING)
    assert (manual_clock.monotonic(), simulated_disk.files()) == (3600.0, {})
""")
    done = pytest_run(tmp_path)
    assert "3 passed" in done.stdout, done.stdout


@pytest.mark.matrix
def test_a_failure_of_a_suite_shows_the_values(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import pytest
from strandline import testing


class Lazy(testing.MemorySink):
    def apply(self, records, *, since, upto):
        pass


class TestLazy(testing.SinkContract):
    @pytest.fixture
    def sink(self):
        return Lazy()

    def content(self, sink):
        return {}
""")
    shown = pytest_run(tmp_path, "-k", "data_and_cursor_are_there").stdout
    assert "assert None == Cursor(" in shown


def test_another_suite_does_not_pay_for_the_plugin() -> None:
    code = "import sys, strandline.testing.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert not {"pyarrow", "obstore", "strandline.model", "strandline.log"} & set(done.stdout.split())


def test_the_package_registers_the_plugin() -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"strandline": "strandline.testing.plugin"}
