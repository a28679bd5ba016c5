"""The README's examples, run as they stand, on a folder instead of a bucket."""

import re
import tomllib
from pathlib import Path

import strandline as sl

HOME = Path(__file__).parents[2]
README = HOME / "README.md"


def example(heading: str) -> str:
    """The Python block below a heading."""
    section = README.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def run(heading: str, folder: Path, **names: object) -> dict[str, object]:
    disk = folder / "disk"  # a place of its own: what is in the bucket is not hidden by what is on the disk
    disk.mkdir(exist_ok=True)
    code = example(heading).replace("s3://bucket", str(folder)).replace("/var/lib", str(disk))
    assert len(code.splitlines()) <= 10, "an example is ten lines at most"
    scope = dict(names)
    exec(compile(code, f"README: {heading}", "exec"), scope)
    return scope


def test_appending_works_as_the_readme_shows_it(tmp_path: Path) -> None:
    assert run("Append", tmp_path)["handle"].result().first == 0
    rows = [row for batch in sl.open(str(tmp_path / "orders")).read() for row in batch.to_pylist()]
    assert [(row["key"], row["value"]) for row in rows] == [(b"order-1", b'{"state": "new"}'), (b"order-0", None)]


def test_a_service_follows_a_log_as_the_readme_shows_it(tmp_path: Path) -> None:
    seen = []
    scope = run("Keep a service's state in step", tmp_path, apply=seen.extend)
    assert [(update.key, update.value) for update in seen] == [(b"node.1", b"10.0.0.1")]
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
