"""docs/architecture.md names every package, and only modules and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import strandline as sl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "strandline"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def drawn_packages() -> set[str]:
    """The folders in the picture, as paths below the package: a line is indented by two spaces for each level."""
    picture = PAGE.split("## The packages")[1].split("```")[1]
    found: set[str] = set()
    above: list[str] = []
    for line in filter(None, picture.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split("  +", line.strip())[0].split()
        found |= {"/".join([*above[:depth], name]) for name in names}
        above = [*above[:depth], names[0]]
    return found


def test_the_picture_has_every_package_in_its_place_and_no_other() -> None:
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    drawn = drawn_packages()
    assert folders - drawn == {folder for folder in folders if folder.startswith("testing/")}
    assert drawn - folders <= modules


def test_the_page_names_every_namespace_of_the_front() -> None:
    namespaces = {name for name in sl.__all__ if (PACKAGE / name).is_dir()} | {"errors"}
    sentence = PAGE.split("the rest is in")[1].split(". ")[0]
    assert set(re.findall(r"`sl\.(\w+)`", sentence)) == namespaces


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
