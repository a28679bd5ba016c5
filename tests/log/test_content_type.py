"""The content type of a log: recorded once, refused if it differs, kept by everything that writes the identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.json.checked import sealed
from strandline.formats.object import identity as identity_format
from strandline.formats.wal import folder as folder_format
from strandline.log.wal import snapshot
from strandline.log.wal.log import WalLog

JSON = "application/json"
SCHEMES = pytest.mark.parametrize("scheme", ["file", "wal"])


def address(tmp_path: Path, scheme: str) -> str:
    return f"{scheme}://{tmp_path}/log"


@SCHEMES
def test_a_log_keeps_the_content_type_with_which_it_was_created(tmp_path: Path, scheme: str) -> None:
    url = address(tmp_path, scheme)
    with sl.open(url, create=True, content_type=JSON) as log:
        assert log.content_type == JSON
    for given in (None, JSON):
        with sl.open(url, create=True, content_type=given) as log:
            assert log.content_type == JSON
            log.evolve_value(sl.values.Json(pa.schema({"id": pa.int64()})))
            log.seal()
            assert log.content_type == JSON
    with sl.open(url) as log:
        assert (log.content_type, log.bounds().sealed) == (JSON, True)


@SCHEMES
def test_another_content_type_is_refused_and_changes_nothing(tmp_path: Path, scheme: str) -> None:
    url = address(tmp_path, scheme)
    sl.open(url, create=True, content_type=JSON).close()
    with pytest.raises(InvalidInput, match=f"created as {JSON}, and not as text/plain"):
        sl.open(url, create=True, content_type="text/plain")
    with sl.open(url) as log:
        assert log.content_type == JSON


@SCHEMES
def test_a_log_without_one_has_the_format_of_before_and_never_gets_one(tmp_path: Path, scheme: str) -> None:
    url = address(tmp_path, scheme)
    with sl.open(url, create=True) as log:
        assert log.content_type is None
    stored = json.loads((tmp_path / "log" / "log.json").read_text())
    assert "content_type" not in stored
    assert stored["min_reader"] == 1
    with pytest.raises(InvalidInput, match="without a content type"):
        sl.open(url, create=True, content_type=JSON)


def test_a_reader_beside_the_writer_knows_it_and_a_cold_tier_too(tmp_path: Path) -> None:
    with sl.open(f"wal://{tmp_path}/log", create=True, content_type=JSON) as log:
        sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.open(f"wal://{tmp_path}/log", read_only=True) as reader:
            assert reader.content_type == JSON
        with pytest.raises(InvalidInput, match="text/plain"):
            sl.open(f"wal://{tmp_path}/log", read_only=True, content_type="text/plain")
    with sl.open(f"wal://{tmp_path}/log") as tiered:
        assert tiered.content_type == JSON


def test_a_copy_of_a_log_has_its_content_type(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    with WalLog.open(str(tmp_path / "log"), content_type=JSON) as log:
        snapshot.fill(log, str(tmp_path / "copy"))
    with WalLog.open(str(tmp_path / "copy")) as copy:
        assert copy.content_type == JSON


@pytest.mark.parametrize("good", ["text/plain; charset=utf-8", 'a/b;c="d e"', "application/vnd.api+json"])
def test_a_media_type_may_have_parameters(tmp_path: Path, good: str) -> None:
    with sl.open(str(tmp_path / "log"), create=True, content_type=good) as log:
        assert log.content_type == good


BAD = ["", "json", "a/b\r\nX: y", "a/b\x00", "a/b/c", "a/ b", "é/b", "a/" + "b" * 300, "a/b; c", "a/b\n"]


@pytest.mark.parametrize("bad", BAD)
@SCHEMES
def test_what_is_no_media_type_is_refused_before_anything_is_made(tmp_path: Path, scheme: str, bad: str) -> None:
    with pytest.raises(InvalidInput, match="content type"):
        sl.open(address(tmp_path, scheme), create=True, content_type=bad)
    assert not (tmp_path / "log" / "log.json").exists()


@SCHEMES
def test_a_program_that_does_not_know_it_refuses_the_log(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would drop the content type when it writes the identity."""
    url = address(tmp_path, scheme)
    sl.open(url, create=True, content_type=JSON).close()
    monkeypatch.setattr(identity_format, "CONTENT_TYPE_VERSION", 1)
    monkeypatch.setattr(folder_format, "SEALED_VERSION", 1)
    with pytest.raises(UnsupportedVersion):
        sl.open(url)


@SCHEMES
@pytest.mark.parametrize("wrong", [7, "no type", "a/b\r\nc", None])
def test_a_stored_content_type_that_is_none_is_damage(tmp_path: Path, scheme: str, wrong: Any) -> None:
    url = address(tmp_path, scheme)
    sl.open(url, create=True, content_type=JSON).close()
    path = tmp_path / "log" / "log.json"
    stored = json.loads(path.read_text())
    del stored["checksum"]
    path.write_bytes(sealed({**stored, "content_type": wrong}))
    with pytest.raises(CorruptData):
        sl.open(url)


def test_the_command_line_records_and_shows_it(tmp_path: Path) -> None:
    run, url = CliRunner().invoke, str(tmp_path / "log")
    assert run(app, ["create", url, "--content-type", JSON]).exit_code == 0
    shown = run(app, ["describe", url, "--json"])
    assert json.loads(shown.stdout)["content_type"] == JSON
    assert JSON in run(app, ["describe", url]).stdout
    again = run(app, ["create", url, "--content-type", "text/plain"])
    assert again.exit_code == 1
