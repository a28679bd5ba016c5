"""The README's examples, run as they stand."""

import re
import tomllib
from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl

HOME = Path(__file__).parents[2]
README = HOME / "README.md"


def example(heading: str, number: int = 0) -> str:
    """A Python block below a heading."""
    section = README.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    code: str = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]
    assert len(code.splitlines()) <= 12, "an example is twelve lines at most"
    return code


def run(heading: str, number: int = 0) -> dict[str, object]:
    """What a block defines; it is run as it stands, in the current folder."""
    scope: dict[str, object] = {}
    exec(compile(example(heading, number), f"README: {heading}", "exec"), scope)
    return scope


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_appending_and_following_work_as_the_readme_shows_them() -> None:
    assert run("Append")["handle"].result().first == 0
    rows = [row for batch in sl.open("./orders").read() for row in batch.to_pylist()]
    assert [(row["key"], row["value"]) for row in rows] == [(b"order-1", b'{"state": "new"}'), (b"order-0", None)]
    scope = run("Follow into a table")
    assert DeltaTable("tables/orders").to_pyarrow_table()["key"].to_pylist() == [b"order-1"]
    assert scope["log"].slots.get("orders-table").position == 2


def test_a_service_follows_a_log_as_the_readme_shows_it() -> None:
    scope = run("Keep a service's state in step")
    assert scope["cache"] == {b"node.1": b"10.0.0.1"}
    assert scope["supervisor"].state().phase == "stopped"
    assert list(scope["store"].range()) == [(b"node.1", b"10.0.0.1")]


def test_the_readme_names_every_extra() -> None:
    extras = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = set(re.findall(r"`(\w+)`", README.read_text().split("extras:")[1]))
    assert told == extras.keys() - {"all", "dev"}


def test_every_link_between_files_leads_somewhere() -> None:
    pages = [*HOME.glob("docs/**/*.md"), *HOME.glob("*.md"), *HOME.glob("examples/**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            generated = (page.parent / target).resolve().parent == HOME / "docs" / "api"
            assert generated or (page.parent / target).exists(), f"{page.name} links to {target}"
