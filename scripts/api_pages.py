"""The site's hook of mkdocs, and an extension of griffe.

The hook takes version and repository from the project's metadata, makes a page of the API for each public namespace
from the names that it offers, so that no name can be forgotten, and gives pictures their narrow version. The extension
makes Markdown of docstrings: it fences examples, which would otherwise be taken for quotations.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "strandline"
NAMESPACES = {
    "": "What most programs need: `import strandline as sl`.",
    "log": "Kinds of logs, and what their calls take and give.",
    "kv": "Key-value stores that can be watched.",
    "followers": "Stores, and what sinks, stores and watchers of your own need.",
    "tables": "Describe, verify, rebuild and repair tables.",
    "values": "Codecs and schemas of typed values.",
    "snapshots": "Sealed state, and stores that begin with it.",
    "tier": "The cold tier.",
    "node": "Primaries, replicas and their clients.",
    "spark": "Pipelines, queries and sessions.",
    "bulk": "Jobs over whole logs, and moves to a copy of a log.",
    "compat": "Queues of version 1 and older spools.",
    "testing": "Test doubles, contract suites and fixtures.",
    "errors": "Every error that the package raises.",
}
FIRST = {
    "": (
        "open", "follow", "ingest", "Consumer", "Supervisor", "watch_applied", "Log", "Producer", "Op", "Cursor",
        "DeltaSink", "IcebergSink", "PostgresSink", "SqliteSink",
    ),
    "followers": ("AppendLogStore", "RocksStore", "MemoryStore", "Batching"),
    "values": ("Json", "Avro", "Protobuf", "MessagePack", "Arrow", "Raw"),
    "kv": ("LogKeyValue", "NatsKeyValue", "MemoryKeyValue"),
    "tables": ("describe", "verify", "rebuild", "letters", "replay_letters", "optimize", "vacuum"),
    "snapshots": ("bootstrap", "newest_snapshot", "Snapshot"),
    "tier": ("attach", "tiered", "tiering", "Tierer", "MetadataManager"),
    "node": ("Primary", "Replica", "RemoteLog", "ServerSecurity", "ClientSecurity", "parse_policy"),
    "spark": ("local_session", "follow", "Following", "PipelineProgress", "rebuild", "read", "start", "listen"),
    "bulk": ("load", "export", "ingest", "verify", "build_snapshot"),
    "errors": ("StrandlineError",),
}  # fmt: skip
"""Names in the order in which a program uses them; the others follow in alphabetical order."""


def public_names(namespace: str) -> Iterator[tuple[str, str]]:
    """Each public name of a namespace, with the full name of what it is.

    >>> dict(public_names("kv"))["LogKeyValue"]
    'strandline.kv.log.LogKeyValue'
    """
    dotted = f"strandline.{namespace}".rstrip(".")
    folder = PACKAGE / namespace / "__init__.py"
    source = folder if folder.exists() else PACKAGE / f"{namespace}.py"
    for node in ast.parse(source.read_text()).body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=imports):
                yield from _imported(imports)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if not name.startswith("_"):
                yield name, f"{dotted}.{name}"


def _imported(nodes: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    seen: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                seen |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
            case ast.Assign(targets=[ast.Name(id=public)], value=ast.Name(id=other)):
                seen[public] = seen.pop(other)  # open = open_url
    for name, full in seen.items():
        if name not in NAMESPACES and not _is_module(full):
            yield name, full


def _is_module(full: str) -> bool:
    path = PACKAGE.parent / full.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def page_of(namespace: str) -> str:
    """The page of a namespace: its names, in the order of use."""
    shown = f"sl.{namespace}".rstrip(".")
    lines = [f"# `{shown}`", "", NAMESPACES[namespace], ""]
    first, named = FIRST.get(namespace, ()), dict(public_names(namespace))
    for name in [*first, *sorted(named.keys() - first, key=str.lower)]:
        full = named[name]
        heading = f"{shown}.{name}"
        lines += [f"::: {full}", "    options:", f"      heading: {heading}", f"      toc_label: {name}", ""]
    return "\n".join(lines)


def on_config(config: Any) -> Any:
    """Show the version and the repository's address, which pyproject.toml has, in the header."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    config.site_name = f"Strandline {project['version']}"
    config.repo_url, config.repo_name = project["urls"]["Source"], "Repository"
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Show each picture in the version that fits, signatures with public names, and code that breaks where words end.

    >>> on_page_content('<p><img alt="a" src="../pictures/a.svg" /></p>')[3:84]
    '<picture><source media="(max-width: 40em)" srcset="../pictures/a-narrow.svg"><img'
    >>> on_page_content("<td><code>strandline_calls</code></td> <p><code>trim --every</code></p>")
    '<td><code>strandline_<wbr>calls</code></td> <p><code>trim <span class="option">--every</span></code></p>'
    >>> on_page_content('<span class="go">error: There is no log.</span> <span class="go">a   b</span>')
    '<span class="go sentence">error: There is no log.</span> <span class="go">a   b</span>'
    """
    html = html.replace('<span class="nf">open_url</span>', '<span class="nf">open</span>')  # its public name
    html = re.sub(
        r"<td\b.*?</td>", lambda cell: _in_code(cell[0], r"(?<=\w)([_./])(?=\w)", r"\1<wbr>"), html, flags=re.DOTALL
    )
    html = _in_code(html, r"(?<![\w-])(--[a-z][a-z-]*)", r'<span class="option">\1</span>')
    # What has columns keeps them, and scrolls; a sentence wraps.
    html = re.sub(r'<span class="go">(?=[^ <│┌├└][^<]* )(?![^<]*(?:  |│))', '<span class="go sentence">', html)
    narrow = r'<picture><source media="(max-width: 40em)" srcset="\2-narrow.svg">\1</picture>'
    return re.sub(r'(<img [^>]*src="([^"]*pictures/\w+)\.svg"[^>]*>)', narrow, html)


def _in_code(html: str, pattern: str, new: str) -> str:
    """Replace a pattern in the text of code, and not in tags."""
    text = re.compile(rf"(<[^>]*>)|{pattern}")
    return re.sub(
        r"<code\b.*?</code>",
        lambda code: text.sub(lambda found: found[1] or found.expand(new.replace(r"\1", r"\2")), code[0]),
        html,
        flags=re.DOTALL,
    )


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages to those of docs/."""
    for namespace in NAMESPACES:
        path = f"api/{namespace or 'strandline'}.md"
        files.append(File.generated(config, path, content=page_of(namespace)))
    return files


def as_markdown(docstring: str) -> str:
    r"""A docstring whose examples are fenced code, and whose references are code.

    >>> as_markdown("Adds to a :class:`~shop.Cart`.\n\n>>> add(1, 2)\n3\n\nMore.")
    'Adds to a `Cart`.\n\n```pycon\n>>> add(1, 2)\n3\n```\n\nMore.'
    """
    docstring = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", docstring)
    if "```" in docstring:
        return docstring
    paragraphs = re.split(r"\n\s*\n", docstring)
    marked = [f"```pycon\n{part}\n```" if part.lstrip().startswith(">>>") else part for part in paragraphs]
    return "\n\n".join(marked)


def option_in(annotation: str) -> str | None:
    """The description of a setting of a node, which is in its type; None without one.

    >>> option_in("Annotated[str, Option('Who it is.', 'NAME')]"), option_in("str")
    ('Who it is.', None)
    """
    match ast.parse(annotation, mode="eval").body:
        case ast.Subscript(
            slice=ast.Tuple(elts=[*_, ast.Call(func=ast.Name("Option"), args=[ast.Constant(said), *_])])
        ):
            return str(said)
    return None


class Examples(griffe.Extension):
    """Makes Markdown of each docstring."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called by griffe for each attribute that it has loaded."""
        said = None if attr.annotation is None else option_in(str(attr.annotation))
        if said is not None and isinstance(attr.annotation, griffe.ExprSubscript):
            attr.docstring = griffe.Docstring(said, parent=attr)
            attr.annotation = attr.annotation.slice.elements[0]  # type: ignore[union-attr]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object that it has loaded."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
