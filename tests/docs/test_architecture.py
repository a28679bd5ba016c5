"""docs/architecture.md names every package, and only modules and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "strandline"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_package_is_in_the_picture() -> None:
    picture = PAGE.split("## The packages")[1].split("```")[1]
    drawn = set(re.findall(r"^ *((?:\w+ ?)+?)(?:  |$)", picture, re.MULTILINE))
    names = {name for line in drawn for name in line.split()}
    inner = {"demo", "doctor", "wal", "tier", "node"}  # the parts of the command line are its subcommands
    for folder in sorted(path.parent for path in PACKAGE.rglob("__init__.py")):
        parts = folder.relative_to(PACKAGE).parts
        if parts and parts[0] != "testing" and not (parts[0] == "cli" and parts[-1] in inner):
            assert parts[-1] in names, folder


def test_every_module_and_test_that_is_named_exists() -> None:
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", PAGE)
    assert len(named) > 60
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    for path in named:
        if path.startswith("tests/"):
            assert (ROOT / path).is_file(), path
        else:
            assert any(module == path or module.endswith("/" + path) for module in modules), path


def test_every_module_is_in_a_package_that_can_be_read_in_an_afternoon() -> None:
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        assert len(list(folder.glob("*.py"))) <= 16, folder
