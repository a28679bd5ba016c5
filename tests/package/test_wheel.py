"""What is installed: the wheel has the package and nothing else, and its metadata is complete."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, as ``make release`` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [path] = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_a_wheel_has_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"strandline", "pyspark_strandline"}
    others = {"strandline/py.typed", "strandline/spark/log4j2.properties"}
    assert {name for name in names if not name.endswith(".py")} == others, "no data of any kind"
    assert not [name for name in names if re.search(r"(^|/)(tests?|benchmarks|examples|conftest\.py)(/|$)", name)]
    sources = {str(path.relative_to(HOME / "src")) for path in (HOME / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


@pytest.mark.parametrize("page", ["install.md", "howto/deploy.md"])
def test_a_page_that_installs_the_wheel_names_it(page: str, built: Path) -> None:
    [path] = built.glob("*.whl")
    assert set(re.findall(r"strandline-[\w.]+-py3-none-any\.whl", (HOME / "docs" / page).read_text())) == {path.name}


def test_a_wheel_is_small(wheel: zipfile.ZipFile) -> None:
    assert sum(entry.compress_size for entry in wheel.infolist()) < 2_000_000


def test_the_metadata_is_complete(metadata: Message) -> None:
    links = dict(text.split(", ") for text in metadata.get_all("Project-URL", []))
    assert links.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert metadata["Name"] == "strandline"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    for field in ("Author", "Maintainer", "Summary", "Keywords"):
        assert metadata[field], field
    classifiers = metadata.get_all("Classifier", [])
    for version in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Typing :: Typed" in classifiers


def test_the_readme_has_no_relative_link_on_a_package_index(metadata: Message) -> None:
    readme = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert readme.startswith("# Strandline")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_what_is_always_installed_is_little(metadata: Message) -> None:
    always = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    names = {re.split(r"[<>=\[ ]", text)[0] for text in always}
    assert names == {"pyarrow", "numpy", "obstore", "google-crc32c", "msgspec", "prometheus-client"}


def test_the_source_archive_is_enough_to_work_on_it(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames()}
    kept = subprocess.run(["git", "ls-files"], cwd=HOME, capture_output=True, text=True, check=False, timeout=120)
    tracked = {name for name in kept.stdout.splitlines() if (HOME / name).exists()}
    assert {"Makefile", "CONTRIBUTING.md", "requirements/dev.lock", "scripts/venv.sh", "mkdocs.yml"} <= names
    assert {name for name in tracked - names if not name.startswith(".")} == set()


def test_a_wheel_can_be_built_from_the_source_archive(built: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=source, capture_output=True, check=True, timeout=600)
    [again] = (tmp_path / "dist").glob("*.whl")
    assert zipfile.ZipFile(again).namelist() == wheel.namelist()


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the wheel, and not this checkout."""
    place = tmp_path_factory.mktemp("site")
    [wheel] = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*command, str(wheel)], check=True, timeout=600)
    return {**os.environ, "PYTHONPATH": str(place), "WHERE": str(place)}


@pytest.mark.matrix
def test_installing_registers_the_pytest_plugin(installed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=HOME / "examples" / "tested_sink", env=installed, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert re.search(r"plugins:.* strandline-", done.stdout)
    assert "14 passed" in done.stdout, done.stdout


@pytest.mark.matrix
def test_the_package_runs_as_a_module(installed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strandline", "--version"], env=installed, capture_output=True, text=True, check=False,
        timeout=600, cwd=installed["WHERE"],
    )  # fmt: skip
    assert re.fullmatch(r"strandline \d+\.\d+\.\d+.*\n", done.stdout), done.stderr


def test_an_import_brings_no_other_package_and_the_whole_front_can_be_listed(installed: dict[str, str]) -> None:
    code = (
        "import os, sys; before = set(sys.modules)\n"
        "import strandline\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert strandline.__file__.startswith(os.environ['WHERE']), strandline.__file__\n"
        "print(*sorted(new - sys.stdlib_module_names))\n"
        "assert 'open' in dir(strandline)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=installed, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.split() == ["strandline"]
