"""The README's examples, run as they stand, on a folder instead of a bucket."""

import re
from functools import partial
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

import strandline as sl
from strandline.followers import run as running

README = Path(__file__).parents[2] / "README.md"


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


def test_appending_and_following_work_as_the_readme_shows_them(tmp_path, monkeypatch):
    scope = run("Append", tmp_path)
    assert scope["handle"].result().first == 0
    # The example follows for ever, which a test cannot: the only change is where it ends.
    monkeypatch.setattr("strandline.followers.run.follow", partial(running.follow, until="end"))
    run("Follow, without Spark", tmp_path)
    rows = pa.table(DeltaTable(str(tmp_path / "tables/orders")).to_pyarrow_table()).to_pylist()
    assert [(row["key"], row["value"]) for row in rows] == [(b"order-1", b'{"state": "new"}')]
    assert sl.open(str(tmp_path / "orders")).slots.get("billing").position == 2


def test_a_queue_works_as_the_readme_shows_it(tmp_path, capsys):
    run("Use it as a queue", tmp_path)
    assert capsys.readouterr().out == "[b'first job', b'second job']\n"
    assert sl.open(str(tmp_path / "jobs")).slots.get("workers").position == 2


def test_a_service_follows_a_log_as_the_readme_shows_it(tmp_path):
    seen = []
    scope = run("Keep a service's state in step", tmp_path, apply=seen.extend)
    assert [(update.key, update.value) for update in seen] == [(b"node.1", b"10.0.0.1")]
    assert scope["supervisor"].state().phase == "stopped"
    assert list(scope["store"].range()) == [(b"node.1", b"10.0.0.1")]


def test_a_replica_has_what_was_written_as_the_readme_shows_it(tmp_path, capsys):
    scope = run("Replicate it", tmp_path)
    try:
        assert "6F72646572" in capsys.readouterr().out  # "order", as Arrow prints bytes
        assert scope["commit"].outcome.watermark == 1
    finally:
        scope["replica"].close()
        scope["primary"].close()


def test_every_link_leads_somewhere():
    pages = [README, *README.parent.glob("docs/*.md"), *README.parent.glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
