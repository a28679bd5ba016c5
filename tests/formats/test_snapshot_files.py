"""The manifest of a snapshot, its pointer and the lease: round trips, and errors for hostile bytes."""

from __future__ import annotations

import json
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.snapshot.manifest import decode_snapshot, encode_snapshot
from strandline.model.cursor import Cursor
from strandline.model.json_values import LARGEST
from strandline.model.snapshot import Snapshot, SnapshotFile
from tests.matrix_cases import examples

FILE = SnapshotFile("state/all.log", 12, "0f" * 32)
SNAPSHOT = Snapshot("/snap", "append-log", 3, Cursor(UUID(int=7), 42, 2), 1_700_000_000_000_000, (FILE,))

names = st.text(st.characters(codec="utf-8", exclude_characters="/\\", exclude_categories=("Cc", "Cs")), min_size=1)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def snapshots(draw):
    chosen = draw(st.lists(paths.filter(lambda path: len(path) < 200), unique=True, max_size=5))
    chosen = [path for path in chosen if not any(path.startswith(f"{other}/") for other in chosen)]
    files = tuple(SnapshotFile(path, draw(st.integers(0, 2**63 - 1)), draw(hashes)) for path in chosen)
    cursor = Cursor(draw(st.uuids()), draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**63 - 1)))
    kind = draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True))
    return Snapshot("/s", kind, draw(st.integers(0, 1000)), cursor, draw(st.integers(0, 2**63 - 1)), files)


@given(snapshots())
@settings(max_examples=examples(100), deadline=None)
def test_a_manifest_survives_its_bytes(snapshot):
    assert decode_snapshot(encode_snapshot(snapshot), "x", "/s") == snapshot


def test_the_bytes_are_what_was_written_down():
    assert json.loads(encode_snapshot(SNAPSHOT)) == {
        "schema": 1,
        "kind": "append-log",
        "kind_version": 3,
        "cursor": {"log_id": "00000000-0000-0000-0000-000000000007", "next": 42, "term": 2},
        "created": 1_700_000_000_000_000,
        "files": [{"path": "state/all.log", "size": 12, "sha256": "0f" * 32}],
    }


def forged(**changes: object) -> bytes:
    return json.dumps({**json.loads(encode_snapshot(SNAPSHOT)), **changes}).encode()


def row(**changes: object) -> dict[str, object]:
    return {"path": "a", "size": 1, "sha256": "0f" * 32, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": None}, {"schema": -1}, {"schema": True}, {"schema": "1"}, {"schema": [1]},
        {"kind": ""}, {"kind": "../x"}, {"kind": 7}, {"kind": "a" * 65}, {"kind": None}, {"kind": "A"},
        {"kind_version": -1}, {"kind_version": 1.5}, {"kind_version": None},
        {"cursor": None}, {"cursor": []}, {"cursor": "x"}, {"cursor": {"log_id": "x", "next": 1, "term": 0}},
        {"cursor": {"log_id": 7, "next": 1, "term": 0}}, {"cursor": {"log_id": str(UUID(int=7)), "next": 1}},
        {"cursor": {"log_id": str(UUID(int=7)), "next": 1 << 65, "term": 0}},
        {"cursor": {"log_id": str(UUID(int=7)), "next": 1 << 63, "term": 0}},
        {"cursor": {"log_id": str(UUID(int=7)), "next": -1, "term": 0}},
        {"created": -1}, {"created": 1 << 64}, {"created": "now"},
        {"files": None}, {"files": {}}, {"files": 7}, {"files": ["a"]}, {"files": [None]}, {"files": [{}]},
        {"files": [row(path=7)]}, {"files": [row(path="")]}, {"files": [row(path="a" * 1025)]},
        {"files": [row(path="\ud800")]}, {"files": [row(path="a\n")]}, {"files": [row(path="a/")]},
        {"files": [row(path="/a")]}, {"files": [row(path="..")]}, {"files": [row(path="a/../../b")]},
        {"files": [row(path="C:\\x")]}, {"files": [row(path="a\0")]},
        {"files": [row(size=-1)]}, {"files": [row(size=1 << 63)]}, {"files": [row(size=True)]},
        {"files": [row(sha256="0F" * 32)]}, {"files": [row(sha256="0f" * 31)]}, {"files": [row(sha256=None)]},
        {"files": [row(), row()]}, {"files": [row(), row(path="a/b")]}, {"files": [row(path="a/b/c"), row()]},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_fields_are_damage_that_names_the_object(changes):
    with pytest.raises(CorruptData, match=r"^it is damaged: .* Take another snapshot\.$"):
        decode_snapshot(forged(**changes), "it", "/s")


@pytest.mark.parametrize("data", [b"", b"null", b"7", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'"x"'])
def test_bytes_that_are_no_manifest_are_damage(data):
    with pytest.raises(CorruptData, match="it is damaged"):
        decode_snapshot(data, "it", "/s")


def test_a_newer_schema_asks_for_an_upgrade():
    with pytest.raises(UnsupportedVersion, match="is of version 2, and this program reads version 1: upgrade"):
        decode_snapshot(forged(schema=2, files="unknown"), "it", "/s")


def test_a_document_that_is_too_large_is_refused_unread():
    with pytest.raises(CorruptData, match="too large for a JSON document"):
        decode_snapshot(b" " * (LARGEST + 1), "it", "/s")


def test_unknown_fields_are_ignored():
    assert decode_snapshot(forged(comment="by hand"), "it", "/snap") == SNAPSHOT


def test_a_snapshot_that_could_not_be_read_again_is_not_written():
    for file in (SnapshotFile("../x", 1, "0f" * 32), SnapshotFile("x", 1, "none"), SnapshotFile("x", -1, "0f" * 32)):
        with pytest.raises(InvalidInput, match="No snapshot can be sealed"):
            encode_snapshot(Snapshot("/s", "k", 1, SNAPSHOT.cursor, 0, (file,)))
    with pytest.raises(InvalidInput, match="cannot be a kind"):
        encode_snapshot(Snapshot("/s", "A kind", 1, SNAPSHOT.cursor, 0, ()))
