"""The stored objects that the page on formats shows, beside real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

import strandline as sl
from tests.docs.pages import HOME, blocks


def shown(key: str) -> dict[str, object]:
    """The object of the page that has this key."""
    texts = [block.body for block in blocks((HOME / "docs" / "formats.md").read_text()) if block.language == "json"]
    objects = [json.loads(text if text.startswith("{") else f"{{{text}}}") for text in texts]
    return next(found for found in objects if key in found)


def shape(value: object) -> object:
    """Names and types, without values."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(inner) for inner in value] if isinstance(value, list) else type(value)


def test_the_value_format_of_a_log_is_stored_as_the_page_shows_it(tmp_path: Path) -> None:
    sl.open(str(tmp_path), create=True, value=sl.values.Json(pa.schema({"id": pa.int64()}))).close()
    assert json.loads((tmp_path / "log.json").read_text())["values"] == shown("values")["values"]


def test_the_manifest_of_a_snapshot_is_as_the_page_shows_it(tmp_path: Path) -> None:
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        producer.append(key=b"a", value=b"1")
    with sl.followers.AppendLogStore.open(str(tmp_path / "store")) as store:
        sl.follow(log, store, upto="end")
        store.export_to(str(tmp_path / "snapshot"))
    stored = json.loads((tmp_path / "snapshot" / "MANIFEST.json").read_text())
    assert shape(stored) == shape(shown("cursor"))
    assert (stored["schema"], stored["kind"], stored["kind_version"]) == (1, "append-log", 1)
    assert [file["path"] for file in stored["files"]] == [file["path"] for file in shown("cursor")["files"]]
