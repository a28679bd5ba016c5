"""Every package that the sources import is declared: users do not have what a development package happens to bring."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

HOME = Path(__file__).parents[2]
OF_TESTS = {"pytest", "hypothesis"}
"""Imported by strandline.testing only, which is for programs that have them."""
WITH_OTHERS = {"py4j"}
"""Pinned by pyspark, of which it is a part."""
TYPES_ONLY = {"_typeshed"}
"""Of the type checker."""


def _project() -> dict[str, Any]:
    return dict(tomllib.loads((HOME / "pyproject.toml").read_text())["project"])


def imported() -> dict[str, set[str]]:
    """Packages of others, each with the files that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((HOME / "src").rglob("*.py")):
        place = str(path.relative_to(HOME / "src"))
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found[name.partition(".")[0]].add(place)
    own = {path.stem for path in (HOME / "src").iterdir()}
    return {name: places for name, places in found.items() if name not in own | set(sys.stdlib_module_names)}


def declared(*extras: str) -> set[str]:
    """Names of the packages that an installation with these extras asks for, in lower case."""
    project = _project()
    wanted = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    return {Requirement(text).name.lower() for text in wanted}


@pytest.mark.matrix
def test_every_imported_package_is_declared() -> None:
    extras = [name for name in _project()["optional-dependencies"] if name not in ("all", "dev")]
    known = declared(*extras) | OF_TESTS | WITH_OTHERS
    homes = packages_distributions()
    missing = {
        name: sorted(places)
        for name, places in imported().items()
        if name not in TYPES_ONLY and not known & {home.lower().replace("_", "-") for home in homes[name]}
    }
    assert missing == {}


def brought(*extras: str) -> set[str]:
    """The packages that an installation with these extras has: the declared ones, and what they need themselves."""
    found: set[str] = set()
    waiting = sorted(declared(*extras))
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for text in requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(need.name.lower().replace("_", "-"))
    return found


HIDING = """if True:
    import importlib.abc, sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in HIDDEN:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
"""
TABLES = """if True:
    import strandline as sl
    log = sl.open(FOLDER + "/orders", create=True)
    with log.producer() as producer:
        for number in range(20):
            producer.append(key=b"%d" % (number % 7), value=b"%d" % number)
        producer.append(key=b"3", op=sl.Op.DELETE)
    for mode in ("latest", "append"):
        assert sl.follow(log, TABLE, upto="end").next == 21
    assert sl.bulk.build_snapshot(log, FOLDER + "/snapshot").cursor.next == 21
"""
COMMANDS = """if True:
    import sys
    from strandline.cli import main
    for words in (
        ["produce", FOLDER + "/routes", "--create", "--count", "5"],
        ["tail", FOLDER + "/routes"],
        ["follow", FOLDER + "/routes", f"sqlite:{FOLDER}/tables.db#routes", "--until", "end"],
        ["export", FOLDER + "/routes", FOLDER + "/exported"],
        ["describe", FOLDER + "/routes"],
    ):
        sys.argv = ["strandline", *words]
        try:
            main()
        except SystemExit as end:
            assert not end.code, words
"""


@pytest.mark.parametrize(
    ("extras", "program"),
    [
        ([], TABLES.replace("TABLE,", 'sl.SqliteSink(f"{FOLDER}/tables.db", table=mode, mode=mode),')),
        (["delta"], TABLES.replace("TABLE,", 'sl.DeltaSink(f"{FOLDER}/{mode}", mode=mode),')),
        (["cli"], COMMANDS),
    ],
    ids=["sqlite", "delta", "commands"],
)
def test_tables_snapshots_and_commands_need_no_package_that_is_not_declared(
    extras: list[str], program: str, tmp_path: Path
) -> None:
    there = brought(*extras)
    hidden = {
        module
        for module, homes in packages_distributions().items()
        if module not in {"strandline", "pyspark_strandline"}
        and not there & {home.lower().replace("_", "-") for home in homes}
    }
    assert {"pytest", "duckdb", "pandas"} <= hidden, "it hides what only developers have"
    given = f"HIDDEN, FOLDER = {hidden!r}, {str(tmp_path)!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", given + HIDING + program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
