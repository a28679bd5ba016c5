"""Each library that the package imports is declared by itself, and not only there because another one brings it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT = {
    "py4j": "part of pyspark",
    "pytest": "of the plugin for tests, which pytest imports",
    "hypothesis": "of the contract suites for tests",
}
"""Modules without a declaration of their own, and why."""


def imported() -> Iterator[tuple[str, str]]:
    """Every library that a module imports, at its top or in a function, except for type checkers."""
    for path in sorted((ROOT / "src" / "strandline").rglob("*.py")):
        tree = ast.parse(path.read_text())
        checked = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in node.body
            for part in ast.walk(inner)
        }
        for node in ast.walk(tree):
            if id(node) in checked:
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                yield name.partition(".")[0], str(path.relative_to(ROOT))


def declared() -> set[str]:
    extras = [extra for name, extra in PROJECT["optional-dependencies"].items() if name not in ("all", "dev")]
    wanted = [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]
    return {re.split(r"[\[<>=!~ ]", one)[0].lower().replace("_", "-") for one in wanted}


def test_every_imported_library_is_declared() -> None:
    own, known = declared(), packages_distributions()
    missing = {
        f"{place}: {module}"
        for module, place in imported()
        if module not in sys.stdlib_module_names and not module.startswith(("strandline", "pyspark_strandline"))
        if module not in BROUGHT
        if not own & {name.lower().replace("_", "-") for name in known.get(module, [module])}
    }
    assert missing == set()
