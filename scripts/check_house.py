"""What the linter cannot see: files opened behind the disk's back.

Usage: check_house.py [FILE_OR_FOLDER ...], by default the package. Prints one line per offence and exits
with 1 if there is any. Ruff bans the named functions (``time.time``, ``os.fsync``, ...); this bans the
builtin ``open`` and the methods by which a ``Path`` reads and writes, in every room but those that own the
disk or may touch it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "strandline"
FREE_ROOMS = frozenset({"storage", "testing", "cli"})
WHOLE_FILE_METHODS = frozenset({"read_bytes", "write_bytes", "read_text", "write_text"})
PATH_TYPES = frozenset({"Path", "PosixPath", "WindowsPath"})


def offences(source: str) -> list[tuple[int, str]]:
    r"""Line and complaint for each place that reaches for a file.

    >>> offences("with open('x') as file: pass")
    [(1, 'the builtin open')]
    >>> offences("from pathlib import Path\nPath('x').open()")
    [(2, 'Path.open')]
    >>> offences("log = sl.open('memory://')\ndisk.read('x')")
    []
    """
    tree = ast.parse(source)
    paths = set(_path_names(tree))
    return sorted(_walk(tree, paths))


def _walk(tree: ast.AST, paths: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            # As a value too: passing `open` on is opening by proxy.
            case ast.Name(id="open", ctx=ast.Load()):
                yield node.lineno, "the builtin open"
            case ast.Attribute(value=ast.Name(id="builtins"), attr="open"):
                yield node.lineno, "the builtin open"
            case ast.Attribute(attr=name) if name in WHOLE_FILE_METHODS:
                yield node.lineno, f"Path.{name}"
            case ast.Attribute(value=owner, attr="open") if _is_path(owner, paths):
                yield node.lineno, "Path.open"


def _path_names(tree: ast.AST) -> Iterator[str]:
    """Names that are annotated as a path, or bound to one."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as kind) if _mentions_path(kind):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=kind) if _mentions_path(
                kind
            ):
                yield name
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value) if _is_path(
                value, set()
            ):
                yield name


def _mentions_path(annotation: ast.expr) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id in PATH_TYPES)
        or (isinstance(node, ast.Attribute) and node.attr in PATH_TYPES)
        or (isinstance(node, ast.Constant) and node.value in PATH_TYPES)
        for node in ast.walk(annotation)
    )


def _is_path(node: ast.expr, paths: set[str]) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in paths:
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in PATH_TYPES:
            return True
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _is_path(left, paths) or _is_path(right, paths)
    return False


def _files(places: list[Path]) -> Iterator[Path]:
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            inside = file.resolve().is_relative_to(PACKAGE)
            if not inside or file.resolve().relative_to(PACKAGE).parts[0] not in FREE_ROOMS:
                yield file


def main(arguments: list[str]) -> int:
    """Check the given files, or the package."""
    found = 0
    for file in _files([Path(argument) for argument in arguments] or [PACKAGE]):
        for line, complaint in offences(file.read_text(encoding="utf-8")):
            print(f"{file}:{line}: {complaint}: take a Disk (strandline.storage) instead")
            found += 1
    print(f"House rules: {found} broken" if found else "House rules: kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
