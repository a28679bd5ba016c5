"""The rules of the house bite: each is broken on purpose, and must be caught."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests.matrix_cases import some

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        text=True,
        capture_output=True,
        check=False,
        timeout=600,
        **options,
    )


def ruff(source: str, pretended_path: str) -> set[str]:
    """The rules that ruff, with the project's settings, finds broken in a file of that name."""
    done = run(
        sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise",
        "--stdin-filename", pretended_path, "-", input=source,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return {line.split()[1] for line in done.stdout.splitlines() if line.startswith(pretended_path)}


BANNED = [
    "import time\n\ntime.time()\n",
    "import time\n\ntime.time_ns()\n",
    "import time\n\ntime.monotonic()\n",
    "import time\n\ntime.monotonic_ns()\n",
    "import time\n\ntime.perf_counter()\n",
    "import time\n\ntime.sleep(1)\n",
    "from time import sleep\n\nsleep(1)\n",
    "import time as t\n\nt.time()\n",
    "import datetime\n\ndatetime.datetime.now(tz=datetime.UTC)\n",
    "from datetime import UTC, datetime\n\ndatetime.now(tz=UTC)\n",
    "import random\n\nrandom.random()\n",
    "import secrets\n\nsecrets.token_bytes()\n",
    "import os\n\nos.urandom(8)\n",
    "import uuid\n\nuuid.uuid4()\n",
    "from uuid import uuid4\n\nuuid4()\n",
    "import os\n\nos.fsync(1)\n",
    "import os\n\nos.fdatasync(1)\n",
    "import os\n\nos.open('x', os.O_RDONLY)\n",
    "import os\n\nos.replace('a', 'b')\n",
    "import os\n\nos.rename('a', 'b')\n",
    "import tempfile\n\ntempfile.mkdtemp()\n",
]


@pytest.mark.parametrize("source", some(BANNED, 5))
def test_the_clock_the_disk_and_chance_are_banned_outside_their_room(source: str) -> None:
    assert "TID251" in ruff(source, "src/strandline/log/example.py")


@pytest.mark.parametrize(("more", "count"), [("self, *, m", 12), ("self, m, *, n", 13)])
def test_a_function_with_more_than_twelve_parameters_is_caught(more: str, count: int) -> None:
    names = ", ".join([*more.split(", "), *"abcdefghijk"])
    found = ruff(f"class A:\n    def f({names}) -> None:\n        ...\n", "src/strandline/example.py")
    assert ("PLR0913" in found) == (count > 12)


@pytest.mark.parametrize("room", some(["model", "formats", "log/object", "follow", "spark"], 2))
def test_the_ban_reaches_every_room(room: str) -> None:
    assert "TID251" in ruff("import time\n\ntime.time()\n", f"src/strandline/{room}/example.py")


@pytest.mark.parametrize("place", ["src/strandline/storage", "src/strandline/testing", "src/strandline/cli", "tests"])
def test_the_ban_spares_the_modules_that_own_the_clock_or_may_use_it(place: str) -> None:
    assert "TID251" not in ruff("import time\n\ntime.time()\n", f"{place}/example.py")


@pytest.mark.parametrize(
    "source",
    [
        "with open('x') as file:\n    pass\n",
        "reader = open\n",
        "import builtins\nbuiltins.open('x')\n",
        "from pathlib import Path\nPath('x').open()\n",
        "from pathlib import Path\ndef f(p: Path) -> None:\n    (p / 'x').open()\n",
        "from pathlib import Path\np = Path('x')\np.open()\n",
        "def f(p):\n    return p.read_bytes()\n",
        "def f(p):\n    p.write_bytes(b'')\n",
        "def f(p):\n    return p.read_text()\n",
        "def f(p):\n    p.write_text('')\n",
    ],
)
def test_files_are_not_opened_behind_the_disks_back(source: str, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(source)
    done = run(sys.executable, "scripts/check_house.py", example)
    assert done.returncode == 1, done.stdout
    assert "take an Env" in done.stdout


def test_opening_a_log_is_not_opening_a_file(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text("import strandline as sl\nlog = sl.open('memory://')\nlog.open()\ndisk.read('x')\n")
    done = run(sys.executable, "scripts/check_house.py", example)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("place", "source", "complaints"),
    [
        ("log/addressed.py", "from importlib import import_module\nopen = import_module('strandline.opening')\n",
         ["'strandline.opening' is above log", "import_module"]),
        ("log/__init__.py", "NAMES = {'Tierer': 'strandline.tier.copy.tierer', 'tier': 'strandline.tier:'}\n",
         ["'strandline.tier.copy.tierer' is above log", "'strandline.tier:' is above log"]),
        ("storage/disk.py", "OTHER = 'strandline.formats.checks'\n", ["'strandline.formats.checks' is above storage"]),
        ("model/cursor.py", "__import__(name)\n", ["__import__"]),
        ("log/__init__.py", "NAMES = {'Bounds': 'strandline.model.cursor', 'topic': 'strandline.log.topic:'}\n", []),
        ("__init__.py", "NAMES = {'open': 'strandline.opening:open_url'}\n", []),
        ("tables/files/recorded.py", "CURSOR = 'strandline.cursor'  # a property of a table\n", []),
        ("cli/app.py", "from importlib import import_module\nimport_module('strandline.cli.logs.tail')\n", []),
    ],
)  # fmt: skip
def test_an_import_by_a_string_goes_down_too(place: str, source: str, complaints: list[str]) -> None:
    upward = runpy.run_path(str(ROOT / "scripts" / "check_house.py"))["upward"]
    assert [complaint for _, complaint in upward(source, place)] == complaints


def contracts_over(package: Path) -> subprocess.CompletedProcess[str]:
    """The project's own import contracts, applied to a make-believe strandline."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    lines = ["[importlinter]", "root_packages =", *(f"    {name}" for name in settings["root_packages"])]
    for number, contract in enumerate(settings["contracts"]):
        lines.append(f"[importlinter:contract:{number}]")
        for key, value in contract.items():
            if isinstance(value, list):
                lines += [f"{key} =", *(f"    {item}" for item in value)]
            else:
                lines.append(f"{key} = {value}")
    (package / "contracts.ini").write_text("\n".join(lines))
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return run(
        sys.executable, "-c", program, "--config", package / "contracts.ini", "--no-cache",
        cwd=package, env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip


def make_believe(folder: Path, files: dict[str, str]) -> Path:
    rooms = ("model", "formats", "storage", "log", "tables", "followers", "spark", "cli", "testing")
    parts = ("object", "wal", "queue", "topic", "read", "slots", "writers", "produce")
    folders = [*rooms, *(f"log/{part}" for part in parts), "tables/maintain"]
    folders += [f"tables/{part}" for part in ("delta", "iceberg", "sql", "files", "rows")]
    empty = {f"strandline/{folder}/__init__.py": "" for folder in folders}
    modules = {f"strandline/tables/maintain/{name}.py": "" for name in ("operations", "opening")}
    skeleton = {"strandline/__init__.py": "", "pyspark_strandline/__init__.py": "", **empty, **modules}
    for name, text in {**skeleton, **files}.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


@pytest.mark.parametrize(
    "way",
    [
        "from strandline.log.contract import Log\n",
        "def late() -> None:\n    import strandline.log.contract\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from strandline.log import contract\n",
    ],
    ids=["at the top", "in a function", "for type checkers"],
)
def test_a_circle_of_modules_is_caught(way: str) -> None:
    circle = runpy.run_path(str(ROOT / "scripts" / "check_house.py"))["circle"]
    sources = {
        "strandline.log.contract": "from strandline.log import handles\n",
        "strandline.log.handles": "import strandline.model.head\n",
        "strandline.model.head": "import json\n",
    }
    assert circle(sources) == []
    sources["strandline.model.head"] += way
    assert sorted(circle(sources)[1:]) == sorted(sources)


def test_imports_that_go_down_the_house_are_fine(tmp_path: Path) -> None:
    package = make_believe(
        tmp_path,
        {
            "strandline/__init__.py": "def __getattr__(name):\n    import strandline.spark\n",
            "pyspark_strandline/__init__.py": "from strandline.spark import x\n",
            "strandline/storage/__init__.py": "from strandline.model import x\n",
            "strandline/log/__init__.py": "import strandline.storage\nimport strandline.formats\n",
            "strandline/followers/__init__.py": "from strandline.log import x\n",
            "strandline/spark/__init__.py": "from strandline.followers import x\n",
            "strandline/cli/__init__.py": "from strandline.spark import x\n",
            "strandline/testing/__init__.py": "from strandline.followers import x\n",
        },
    )
    done = contracts_over(package)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "imports"),
    [
        ("model", "strandline.storage"),
        ("log", "strandline.testing"),
        ("testing", "strandline.spark"),
        *(
            pytest.param(*pair, marks=pytest.mark.matrix)
            for pair in [
                ("storage", "strandline.formats"),
                ("formats", "strandline.storage"),
                ("log", "strandline.followers"),
                ("followers", "strandline.spark"),
                ("spark", "strandline.cli"),
                ("cli", "strandline.testing"),
                ("testing", "strandline.cli"),
            ]
        ),
    ],
)
def test_an_import_against_the_direction_is_caught(room: str, imports: str, tmp_path: Path) -> None:
    package = make_believe(tmp_path, {f"strandline/{room}/__init__.py": f"import {imports}\n"})
    done = contracts_over(package)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


@pytest.mark.parametrize(
    ("part", "imports"),
    some(
        [
            ("log/wal", "log.object"),
            ("log/slots", "log.wal"),
            ("tables/rows", "tables.files"),
            ("tables/delta", "tables.sql"),
        ],
        2,
    ),
)
def test_an_import_between_parts_of_a_room_is_caught(part: str, imports: str, tmp_path: Path) -> None:
    package = make_believe(tmp_path, {f"strandline/{part}/__init__.py": f"import strandline.{imports}\n"})
    done = contracts_over(package)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_a_room_that_is_in_no_layer_is_caught(tmp_path: Path) -> None:
    done = contracts_over(make_believe(tmp_path, {"strandline/attic/__init__.py": ""}))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "attic" in done.stdout


@pytest.mark.parametrize(
    ("reason", "ci", "status"),
    some(
        [
            ("no server: nothing listens on 4222", "true", 1),
            ("no server: nothing listens on 4222", "", 0),
            ("needs a file system with links", "true", 0),
        ],
        1,
    ),
)
def test_a_missing_server_fails_the_run_only_under_ci(reason: str, ci: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.skip(reason={reason!r})\ndef test_it(): pass\ndef test_other(): pass\n"
    )
    done = run(
        sys.executable, "-m", "pytest", "-q", "-p", "tests.plugins.no_missing_servers",
        "-c", tmp_path / "pytest.ini", tmp_path, env={**os.environ, "CI": ci},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr


def test_ci_prints_a_failure_when_it_happens_and_no_row_of_dots(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(1500))\ndef test_it(n): assert n != 7\n"
    )
    done = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.plugins.short_log",
        "-c", tmp_path / "pytest.ini", tmp_path, env={**os.environ, "CI": "true"},
    )  # fmt: skip
    assert done.stdout.index("FAILED in call: test_it.py::test_it[7]") < done.stdout.index("1000 tests have ended")
    assert "...." not in done.stdout
    assert "1 failed, 1499 passed" in done.stdout


def test_the_version_is_written_in_one_place() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert metadata.version("strandline") == declared


def test_every_benchmark_can_be_started() -> None:
    asked = [sys.executable, "-m", "benchmarks", "no-such"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "There is no benchmark no-such; there are append_batch" in done.stderr
