"""One name means one thing: no two classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "strandline"


def shared_names(modules: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Class names that several modules define at their top level, with those modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, source in modules:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: sorted(owners) for name, owners in found.items() if len(owners) > 1}


def test_no_two_classes_share_a_name() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 400
    assert shared_names((str(file.relative_to(PACKAGE)), file.read_text()) for file in files) == {}


def test_a_shared_name_is_found_with_the_modules_that_have_it() -> None:
    modules = [
        ("a.py", "class Shape: ...\n"),
        ("b.py", "class Shape: ...\nclass Other: ...\n"),
        ("c.py", "Shape = 1\n"),
    ]
    assert shared_names(modules) == {"Shape": ["a.py", "b.py"]}
