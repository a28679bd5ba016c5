"""Inferred schemas: from logs of every kind and from files, with fields that came late, and used as they were saved."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.bulk import inferring
from strandline.bulk.load_files import FilePart, RecordFields
from strandline.bulk.load_sources import files_at
from strandline.errors import InvalidInput, NotFound


def value(number: int) -> bytes:
    fields: dict[str, Any] = {"id": number, "at": "2026-01-31T10:00:00Z", "price": f"{number}.50"}
    if number in range(1480, 1540):
        fields["middle"] = [1.5]
    if number >= 2900:
        fields["late"] = {"deep": True}
    return json.dumps(fields).encode()


def filled(log: Any) -> Any:
    with log.producer() as producer:
        for number in range(3000):
            producer.append(key=b"%d" % number, value=value(number))
            if number % 500 == 499:
                producer.flush()
        producer.append(key=b"1", op=sl.Op.DELETE)
    return log


ALL = {"id", "at", "price", "middle", "late"}


@pytest.mark.parametrize("address", ["file://{}/log", "wal://{}/log", "memory://infer-{}"])
def test_a_sample_of_a_log_has_fields_of_its_beginning_its_middle_and_its_end(tmp_path: Path, address: str) -> None:
    with filled(sl.open(address.format(tmp_path), create=True)) as log:
        found = sl.bulk.infer(log, records=400)
    assert set(found.schema.names) == ALL
    assert 390 <= found.values <= 400
    assert found.unfit == 0


def test_a_log_by_its_address_is_the_same_log(tmp_path: Path) -> None:
    with filled(sl.open(f"wal://{tmp_path}/log", create=True)) as log:
        assert sl.bulk.infer(f"wal://{tmp_path}/log") == sl.bulk.infer(log)


def test_a_trimmed_log_is_sampled_from_its_first_retained_record(tmp_path: Path) -> None:
    log = filled(sl.open(f"file://{tmp_path}/log", create=True, retention="bytes:1"))
    log.slots.create("pins", 1000)
    log.trim()
    assert log.bounds().first == 1000
    assert "of the offsets 1,000 up to 3,001" in sl.bulk.infer(log, records=100).document["description"]


def lines(folder: Path) -> bytes:
    return b"".join(value(number) + b"\n" for number in range(3000))


def exported(form: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        log = filled(sl.open(f"file://{folder}/log", create=True))
        sl.bulk.export(log, folder / "out", format=form)  # type: ignore[arg-type]
        return folder / "out"

    return write


def plain(folder: Path) -> Path:
    (folder / "rows.jsonl").write_bytes(lines(folder))
    return folder / "rows.jsonl"


def compressed(folder: Path) -> Path:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(folder)))
    return folder / "rows.jsonl.gz"


def many(folder: Path) -> Path:
    (folder / "files").mkdir()
    for number in range(30):
        part = b"".join(value(row) + b"\n" for row in range(number * 100, number * 100 + 100))
        (folder / "files" / f"part-{number:02}.jsonl").write_bytes(part)
    return folder / "files"


@pytest.mark.parametrize("written", [plain, compressed, exported("jsonl"), exported("parquet")])
@pytest.mark.parametrize("window", [4 << 20, 5000])
def test_files_of_values_and_of_records_are_sampled_from_all_of_them(
    tmp_path: Path, written: Callable[[Path], Path], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inferring, "_WINDOW", window)
    found = sl.bulk.infer(written(tmp_path), records=400)
    assert set(found.schema.names) == ALL
    assert 200 < found.values <= 400
    assert found.unfit == 0


def test_of_many_files_the_first_the_last_and_some_between_are_sampled(tmp_path: Path) -> None:
    found = sl.bulk.infer(many(tmp_path), records=400)
    assert {"id", "late"} <= set(found.schema.names)
    assert 390 <= found.values <= 400


def test_a_window_of_a_file_has_whole_lines_each_in_one_window_only(tmp_path: Path) -> None:
    [file] = files_at([plain(tmp_path)], None)
    for size in (1000, 77_777, file.size):
        found = []
        for begin in range(0, file.size, size):
            part = FilePart(file, window=range(begin, begin + size))
            found += [one for batch in part.records(RecordFields(), None) for one in batch.column("value").to_pylist()]
        assert len(found) == len(set(found))
        assert set(found) <= {value(number) for number in range(3000)}
        assert len(found) >= 3000 - file.size // size  # a line across two windows is in none


def test_columns_of_a_file_are_proposed_as_they_are(tmp_path: Path) -> None:
    kinds = {"id": pa.int32(), "price": pa.decimal128(12, 2), "at": pa.timestamp("ms"), "tags": pa.list_(pa.string())}
    rows = pa.table({name: pa.array([], kind) for name, kind in kinds.items()})
    pq.write_table(rows, tmp_path / "rows.parquet")
    found = sl.bulk.infer(tmp_path / "rows.parquet")
    assert found.schema == rows.schema
    assert sl.values.Json(found.text).schema == rows.schema
    pq.write_table(pa.table({"other": [1]}), tmp_path / "z.parquet")
    with pytest.raises(InvalidInput, match="different columns"):
        sl.bulk.infer(tmp_path)


def test_values_that_are_too_large_to_be_held_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inferring, "_MOST_BYTES", 10_000)
    found = sl.bulk.infer(plain(tmp_path))
    assert 0 < found.values <= 150
    assert "late" in found.schema.names


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]\n", "line 1, is no JSON object"),
        (b"\xff\xfe{\n", "line 1, is no JSON object"),
        (b"", "no value to infer a schema from"),
        (b'{"a": ' * 5000, "is no JSON object"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_in_the_same_sentence(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InvalidInput, match=said):
        sl.bulk.infer(tmp_path / "rows.jsonl")


def test_where_nothing_is_or_a_format_is_named_already_nothing_is_inferred(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither a log nor a file"):
        sl.bulk.infer(tmp_path / "nothing.jsonl")
    log = sl.open(f"file://{tmp_path}/log", create=True, value=sl.values.Json(pa.schema({"id": pa.int64()})))
    with pytest.raises(InvalidInput, match="names the format of its values already"):
        sl.bulk.infer(log)


@pytest.mark.parametrize("table", ["delta", "sqlite"])
def test_a_saved_proposal_makes_a_table_of_all_records(tmp_path: Path, table: str) -> None:
    log = filled(sl.open(f"file://{tmp_path}/log", create=True))
    schema = tmp_path / "order.json"
    schema.write_text(sl.bulk.infer(log).text)
    codec = sl.values.Json(schema.read_text())
    if table == "delta":
        sink: Any = sl.DeltaSink(f"{tmp_path}/table", value=codec, dead_letters=f"{tmp_path}/letters")
    else:
        sink = sl.SqliteSink(f"{tmp_path}/table.db", table="orders", value=codec, dead_letters=True)
    sl.follow(log, sink, upto="end")
    assert sink.bad_records == 0
    assert sink.size().rows == 2999
    assert sl.tables.verify(sink, log).is_clean
