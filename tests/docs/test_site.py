"""The pages as a site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]


def built(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def test_every_page_is_in_the_site_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = built(HOME / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (HOME / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}


@pytest.mark.matrix
def test_a_link_that_leads_nowhere_breaks_the_site(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    for page in (HOME / "docs").glob("*.md"):
        (tmp_path / "docs" / page.name).write_text(page.read_text())
    (tmp_path / "docs" / "index.md").write_text("[nothing](logs.md#no-such-heading)")
    (tmp_path / "mkdocs.yml").write_text((HOME / "mkdocs.yml").read_text())
    assert "no-such-heading" in built(tmp_path / "mkdocs.yml", tmp_path / "site").stderr
