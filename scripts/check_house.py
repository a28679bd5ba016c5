"""What the linters cannot see: files opened behind the disk's back, imports by strings, and circles of modules.

Usage: check_house.py [FILE_OR_FOLDER ...], by default the package. Prints one line per offence and exits
with 1 if there is any. Ruff bans the named functions (``time.time``, ``os.fsync``, ...); this bans the
builtin ``open`` and the methods by which a ``Path`` reads and writes, in every room but those that own the
disk or may touch it. A string that names a module is an import: it may name one of the same room or of a room
below, by the layers in ``pyproject.toml``; and only the two modules that look names up may import a module by name.
No module imports, by any way round, one that imports it: neither within a function nor for type checkers only.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "strandline"
FREE_ROOMS = frozenset({"storage", "testing", "cli"})
WHOLE_FILE_METHODS = frozenset({"read_bytes", "write_bytes", "read_text", "write_text"})
PATH_TYPES = frozenset({"Path", "PosixPath", "WindowsPath"})
TAKE_A_DISK = "take an Env (strandline.storage.env) and use its disk"
LOOKS_NAMES_UP = frozenset({"lazy_names.py", "cli/app.py"})
IMPORTERS = frozenset({"import_module", "__import__", "run_module"})
MODULE = re.compile(r"strandline\.([a-z_]+)(\.\w+)*(:\w*)?")


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


def layers() -> list[set[str]]:
    """The rooms of the house from the top, as ``pyproject.toml`` has them."""
    settings = tomllib.loads((PACKAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    [house] = [
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract.get("exhaustive")
    ]
    return [set(re.findall(r"\w+", layer)) for layer in house["layers"]]


def upward(source: str, place: str) -> list[tuple[int, str]]:
    """Line and complaint for each import by a string in the module at this place of the package.

    >>> upward("NAMES = {'open': 'strandline.opening:open_url'}", "log/addressed.py")
    [(1, "'strandline.opening:open_url' is above log")]
    >>> upward("NAMES = {'Cursor': 'strandline.model.cursor'}", "log/addressed.py")
    []
    >>> upward("import_module(name)", "log/addressed.py")
    [(1, 'import_module')]
    """
    depths = {room: depth for depth, layer in enumerate(layers()) for room in layer}
    room = place.partition("/")[0].removesuffix(".py")
    own = depths.get(room, -1)  # the front of the package, and the doubles, are above all
    found = []

    def _is_above(other: str) -> bool:  # or beside it
        return other != room and depths.get(other, own + 1) <= own

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if (named := MODULE.fullmatch(text)) and _is_above(named[1]):
                found.append((node.lineno, f"{text!r} is above {room}"))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in IMPORTERS and place not in LOOKS_NAMES_UP:
                found.append((node.lineno, name))
    return sorted(found)


def circle(sources: Mapping[str, str]) -> list[str]:
    r"""Modules that import each other in a circle, the first of them again at the end; none if there is no circle.

    >>> circle({"a": "import b", "b": "def f():\n    from a import g"})
    ['a', 'b', 'a']
    >>> circle({"a": "from a import b", "a.b": "import json"})
    []
    """
    imported: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Import(names=names):
                    found = {name.name for name in names}
                case ast.ImportFrom(module=str(place), names=names):
                    inner = {f"{place}.{name.name}" for name in names}
                    found = inner if inner <= sources.keys() else inner | {place}
                case _:
                    continue
            imported[module] |= found & sources.keys() - {module}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


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


def _complaints(file: Path) -> Iterator[tuple[int, str]]:
    source, here = file.read_text(encoding="utf-8"), file.resolve()
    place = here.relative_to(PACKAGE).as_posix() if here.is_relative_to(PACKAGE) else file.name
    if place.partition("/")[0] not in FREE_ROOMS:
        yield from ((line, f"{what}: {TAKE_A_DISK}") for line, what in offences(source))
    if not place.startswith("testing/"):
        yield from ((line, f"{what}: import downwards, and by a statement") for line, what in upward(source, place))


def main(arguments: list[str]) -> int:
    """Check the given files, or the package."""
    found = 0
    for place in [Path(argument) for argument in arguments] or [PACKAGE]:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            for line, complaint in _complaints(file):
                print(f"{file}:{line}: {complaint}")
                found += 1
    package = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    sources = {name.removesuffix(".__init__"): file.read_text(encoding="utf-8") for name, file in package.items()}
    if not arguments and (around := circle(sources)):
        print(f"{' imports '.join(around)}: let one of them not know the other")
        found += 1
    print(f"House rules: {found} broken" if found else "House rules: kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
