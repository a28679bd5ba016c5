"""The pages as a site."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

import strandline as sl
from scripts.api_pages import NAMESPACES, public_names
from scripts.draw_pictures import FOLDER, BadPicture, draw
from strandline.log import ObjectLog
from tests.docs.pages import FENCE

HOME = Path(__file__).parents[2]


def built(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def copy_of_the_site(folder: Path) -> Path:
    shutil.copytree(HOME / "docs", folder / "docs")
    for name in ("src", "scripts", "pyproject.toml"):
        (folder / name).symlink_to(HOME / name)
    return Path(shutil.copy(HOME / "mkdocs.yml", folder))


@pytest.mark.matrix
def test_every_page_is_in_the_site_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = built(HOME / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(HOME / "docs").with_suffix("") for path in (HOME / "docs").rglob("*.md")}
    found = {path.relative_to(tmp_path / "site").with_suffix("") for path in (tmp_path / "site").rglob("*.html")}
    assert pages <= found
    reference = (tmp_path / "site" / "api" / "strandline.html").read_text()
    assert "sl.follow" in reference
    assert "&gt;&gt;&gt;" in reference
    assert "<blockquote>" not in reference  # examples are code, not quotations
    order = [re.search(rf"\ssl\.{name}\s", reference).start() for name in ("open", "follow", "ingest", "Consumer")]
    assert order == sorted(order), "the order of use"
    check_front(tmp_path / "site")


def check_front(site: Path) -> None:
    """The site works from the disk: search has its index as a script, and nothing is loaded from elsewhere."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    front = (site / "index.html").read_text()
    loaded = re.findall(r'<(?:script|img|source)[^>]* src(?:set)?="([^"]+)"', front)
    loaded += re.findall(r'<link rel="(?:stylesheet|icon)" href="([^"]+)"', front)
    assert loaded
    assert "assets/iframe-worker.js" in loaded
    assert [name for name in loaded if not (site / name.partition("?")[0]).is_file()] == []
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    assert f"Strandline {project['version']}" in front
    assert f'href="{project["urls"]["Source"]}"' in front


def test_every_list_and_table_is_shown_as_one() -> None:
    """Without an empty line above it, the site shows a list or a table as running text; a heading may be above it."""
    for path in (HOME / "docs").rglob("*.md"):
        lines = FENCE.sub("```", path.read_text()).splitlines()
        for above, line in itertools.pairwise(lines):
            row = line.startswith("| ") and not above.startswith(("|", "#", "<!--"))
            item = re.match(r"- |\d+\. ", line) and not re.match(r"- |\d+\. |  |#", above)
            assert not above.strip() or not (row or item), f"{path.name}: {line}"


def test_the_site_swallows_no_words() -> None:
    """What looks like a tag of HTML is not shown: write it as code."""
    for path in (HOME / "docs").rglob("*.md"):
        text = re.sub(r"`[^`\n]*`|<!--.*?-->", "", FENCE.sub("", path.read_text()), flags=re.DOTALL)
        assert not re.findall(r"<[/A-Za-z].*", text), path.name


@pytest.mark.matrix
def test_a_link_that_leads_nowhere_breaks_the_site(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    config = copy_of_the_site(tmp_path)
    (tmp_path / "docs" / "comparison.md").write_text("[nothing](logs.md#no-such-heading)")
    done = built(config, tmp_path / "site")
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_reference_has_every_public_name(namespace: str) -> None:
    module = import_module(f"strandline.{namespace}".rstrip("."))
    offered = getattr(module, "__all__", [])
    named = dict(public_names(namespace))
    assert named
    assert {name for name in offered if not isinstance(getattr(module, name), ModuleType)} <= named.keys()
    for name, full in named.items():
        where, _, what = full.rpartition(".")
        assert getattr(import_module(where), what) is getattr(module, name)


def test_the_reference_has_every_namespace() -> None:
    assert {name for name in sl.__all__ if isinstance(getattr(sl, name), ModuleType)} <= NAMESPACES.keys()


def test_pictures_are_as_their_texts_say() -> None:
    texts = sorted(FOLDER.glob("*.txt"))
    assert len(texts) >= 4
    for text in texts:
        picture = draw(text.read_text())
        assert text.with_suffix(".svg").read_text() == picture, "run scripts/draw_pictures.py"
        assert "prefers-color-scheme: dark" in picture
        assert text.stem.endswith("-narrow") or text.with_stem(f"{text.stem}-narrow").exists()
        ET.fromstring(picture)


def test_a_picture_is_not_drawn_of_what_is_not_understood() -> None:
    with pytest.raises(BadPicture, match="circle"):
        draw('picture 10 10 "a"\ncircle 1 2 3')


def test_the_page_on_configuration_names_every_variable_of_the_package() -> None:
    page = (HOME / "docs" / "configuration.md").read_text()
    sources = "".join(path.read_text() for path in (HOME / "src").rglob("*.py"))
    variables = set(re.findall(r"\bSTRANDLINE_[A-Z_]+\b", sources))
    assert variables
    for variable in variables:
        assert f"`{variable}`" in page


def test_the_page_on_configuration_has_the_defaults_of_a_producer() -> None:
    page = (HOME / "docs" / "configuration.md").read_text()
    options = inspect.signature(ObjectLog.producer).parameters
    defaults = {name: option.default for name, option in options.items()} | dataclasses.asdict(ObjectLog._limits)
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.split("## A producer")[1], re.MULTILINE))
    assert told.keys() == options.keys() - {"self"}
    units = {"batch_bytes": ("MiB", 1 << 20), "budget": ("MiB", 1 << 20), "linger": ("s", 1)}
    for name, (unit, size) in units.items():
        assert told[name] == f"{defaults[name] / size:g} {unit}"
    assert int(told["uploads"]) == defaults["uploads"]
