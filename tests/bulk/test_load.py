"""Loading of files: every row once and in order, whatever the format, however often the job is repeated."""

from __future__ import annotations

import contextlib
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.errors import Diverged, InvalidInput, NotFound, SchemaRefused, Unsupported
from strandline.log.object import ObjectLog
from strandline.log.object.log import open_log
from strandline.model.records import Op
from strandline.storage.objects.local import LocalStore
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.bulk.test_export import Interrupted


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    log = sl.open(f"file://{tmp_path}/log", create=True)
    assert isinstance(log, ObjectLog)
    return log


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three files of JSON lines, ten objects each."""
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"id": row, "name": f"n{row}"}) for row in range(number * 10, number * 10 + 10)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "_SUCCESS").write_text("")
    (folder / ".hidden").write_text("x")
    return folder


def rows(log: Any) -> list[dict[str, Any]]:
    return [row for batch in log.read() for row in batch.to_pylist()]


PART = "strandline.bulk.loading.PART_BYTES"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task loads one file."""
    monkeypatch.setattr(PART, 1)


def pairs(log: Any) -> list[tuple[bytes | None, bytes | None]]:
    return [(row["key"], row["value"]) for row in rows(log)]


EXPECTED = [(b"%d" % row, json.dumps({"id": row, "name": f"n{row}"}).encode()) for row in range(30)]


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_json_lines_become_records_in_the_order_of_files_and_lines(
    log: ObjectLog, files: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(PART, part_bytes)
    done = sl.bulk.load(files, log, job="a", key="id", on_progress=lambda *one: told.append(one))
    assert (done.files, done.records, done.first) == (3, 30, 0)
    assert pairs(log) == EXPECTED
    assert told[-1][0] == told[-1][1] == sum(path.stat().st_size for path in files.glob("part*"))
    assert not list(log.store.list("staged/"))
    again = sl.bulk.load(str(files), log, job="a", key="id")
    assert (again, log.bounds().next) == (done, 30)
    assert sl.bulk.load([files / "part-1.jsonl"], log, job="b", key="id").first == 30
    assert pairs(log)[30:] == EXPECTED[10:20]


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.csv.gz", "rows.parquet", "rows.arrow", "rows.arrows", "rows.jsonl.gz"]
)
def test_every_format_gives_the_same_records(log: ObjectLog, tmp_path: Path, name: str) -> None:
    table = pa.table(
        {
            "id": pa.array(range(5)),
            "what": ["put", "delete", "PUT", "purge", None],
            "at": pa.array(["2026-11-01T12:00:00Z"] * 5),
            "text": ["a", "b", "c", "d", "e"],
        }
    )
    path = tmp_path / name
    write(path, table)
    sl.bulk.load(path, log, job="a", key="id", op="what", timestamp="at", value="text")
    assert [(row["op"], row["key"], row["value"]) for row in rows(log)] == [
        (op, b"%d" % number, b"abcde"[number : number + 1])
        for number, op in enumerate([Op.PUT, Op.DELETE, Op.PUT, Op.PURGE, Op.PUT])
    ]
    assert {row["timestamp"] for row in rows(log)} == {datetime(2026, 11, 1, 12, tzinfo=UTC)}


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".arrows":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        if "csv" in path.name:
            lines = [",".join(table.column_names)]
            lines += [",".join("" if cell is None else str(cell) for cell in row.values()) for row in table.to_pylist()]
        else:
            lines = [json.dumps(row) for row in table.to_pylist()]
        data = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_cells_of_csv_are_text_unless_the_log_says_their_types(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('id,name\n007,a\n8,""\n9,\n')
    plain = sl.open(f"file://{tmp_path}/plain", create=True)
    sl.bulk.load(tmp_path / "rows.csv", plain, job="a", key="id")
    assert pairs(plain)[0] == (b"007", b'{"id":"007","name":"a"}')
    assert [json.loads(value or b"")["name"] for _, value in pairs(plain)] == ["a", "", None]
    typed = sl.open(
        f"file://{tmp_path}/typed",
        create=True,
        value=sl.values.Json(pa.schema({"id": pa.int64(), "name": pa.string()})),
    )
    sl.bulk.load(tmp_path / "rows.csv", typed, job="a")
    assert [json.loads(value or b"")["id"] for _, value in pairs(typed)] == [7, 8, 9]


def test_rows_without_a_value_column_are_json_objects(log: ObjectLog, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "name": ["a", None]}), tmp_path / "rows.parquet")
    sl.bulk.load(tmp_path / "rows.parquet", log, job="a", key="id")
    assert [(key, json.loads(value or b"")) for key, value in pairs(log)] == [
        (b"1", {"id": 1, "name": "a"}),
        (b"2", {"id": 2, "name": None}),
    ]


def test_an_export_is_loaded_as_the_records_that_it_has(log: ObjectLog, files: Path, tmp_path: Path) -> None:
    sl.bulk.load(files, log, job="a", key="id")
    manifest = sl.bulk.export(log, tmp_path / "export", part_bytes=1)
    copy = sl.open(f"file://{tmp_path}/copy", create=True)
    sl.bulk.load([tmp_path / "export" / part.path for part in manifest.parts], copy, job="copy")
    assert rows(copy) == rows(log)


@pytest.mark.parametrize("codec", [sl.values.Json, sl.values.MessagePack])
def test_a_typed_log_gets_values_in_its_own_format(tmp_path: Path, files: Path, codec: Any) -> None:
    schema = pa.schema({"id": pa.int64(), "name": pa.string()})
    log = sl.open(f"file://{tmp_path}/log", create=True, value=codec(schema))
    sl.bulk.load(files, log, job="lines", key="id")
    table = pa.table({"id": pa.array(range(30)), "name": [f"n{row}" for row in range(30)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    sl.bulk.load(tmp_path / "rows.parquet", log, job="rows", key="id")
    found = pa.Table.from_batches(sl.log.read_decoded(log)).select(["id", "name"])
    assert found.slice(0, 30).equals(table)
    assert found.slice(30).equals(table)
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n{"id": "x"}\n')
    with pytest.raises(InvalidInput, match=r"bad\.jsonl, line 2, does not fit"):
        sl.bulk.load(tmp_path / "bad.jsonl", log, job="bad")
    assert log.bounds().next == 60


def test_a_large_parquet_file_is_loaded_by_row_groups(
    log: ObjectLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PART, 30_000)
    table = pa.table({"key": [b"%d" % row for row in range(1000)], "value": [b"v" * 100] * 1000})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100, use_dictionary=False, compression="none")
    done = sl.bulk.load(tmp_path / "rows.parquet", log, job="a")
    assert done.records == 1000
    assert len(log.head().tail) > 3
    assert [key for key, _ in pairs(log)] == table.column("key").to_pylist()


def test_files_are_divided_among_all_workers(log: ObjectLog, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(8):
        (tmp_path / "in" / f"{number}.csv").write_text("key,value\n" + f"{number},{'x' * 1_100_000}\n")
    counts: list[int] = []

    class Counting(Interrupted):
        def run(self, tasks: Any, title: str) -> Any:
            counts.append(len(tasks))
            return super().run(tasks, title)

    sl.bulk.load(tmp_path / "in", log, job="a", pool=Counting(-1, lambda: None))
    assert counts == [2]  # of one worker
    assert [key for key, _ in pairs(log)] == [b"%d" % number for number in range(8)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("after", [False, True])
def test_a_load_that_is_killed_at_any_request_continues_and_appends_once(files: Path, after: bool) -> None:
    for number in range(200):
        inner = PlainStore()
        open_log(inner, create=True)
        store = FaultyStore(inner)
        log = open_log(store)
        store.crash_at(number, after=after)
        pool = sl.bulk.ThreadPool(1)
        with contextlib.suppress(Crash):
            sl.bulk.load(files, log, job="a", key="id", pool=pool)
        requests = len(store.log)
        store.unhook()
        for _ in range(2):
            sl.bulk.load(files, open_log(inner), job="a", key="id", pool=pool)
        assert pairs(open_log(inner)) == EXPECTED
        assert not list(inner.list("staged/"))
        if requests < number:
            break
    assert number > 10


def interrupted(files: Path, log: ObjectLog, at: int = 1) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.bulk.load(files, log, job="a", key="id", pool=Interrupted(at, end))


@pytest.mark.usefixtures("small_parts")
def test_a_continued_load_does_not_stage_again_what_is_staged(log: ObjectLog, files: Path) -> None:
    interrupted(files, log, 2)
    told: list[tuple[int, int]] = []
    sl.bulk.load(files, log, job="a", key="id", on_progress=lambda *one: told.append(one))
    assert told[0][0] == sum((files / f"part-{number}.jsonl").stat().st_size for number in range(2))
    assert pairs(log) == EXPECTED


@pytest.mark.usefixtures("small_parts")
def test_a_load_that_divides_its_files_differently_starts_over(
    log: ObjectLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(files, log, 2)
    monkeypatch.setattr(PART, 1 << 20)
    sl.bulk.load(files, log, job="a", key="id")
    assert pairs(log) == EXPECTED


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_loaded", [False, True])
def test_changed_files_and_fields_are_refused(log: ObjectLog, files: Path, is_loaded: bool) -> None:
    if is_loaded:
        sl.bulk.load(files, log, job="a", key="id")
    else:
        interrupted(files, log)
    error: type[Exception] = Diverged if is_loaded else InvalidInput
    count = log.bounds().next
    with pytest.raises(error, match="other files or fields" if is_loaded else "other fields"):
        sl.bulk.load(files, log, job="a", key="name")
    (files / "part-3.jsonl").write_text("{}\n")
    with pytest.raises(error, match=r"other files" if is_loaded else r"without .*part-3"):
        sl.bulk.load(files, log, job="a", key="id")
    (files / "part-3.jsonl").unlink()
    kept = (files / "part-1.jsonl").read_text()
    (files / "part-1.jsonl").write_text(kept + "{}\n")
    with pytest.raises(error, match=r"other files" if is_loaded else r"part-1\.jsonl, which has changed"):
        sl.bulk.load(files, log, job="a", key="id")
    (files / "part-1.jsonl").unlink()
    with pytest.raises(error, match=r"other files" if is_loaded else r"with .*part-1\.jsonl, too"):
        sl.bulk.load(files, log, job="a", key="id")
    assert log.bounds().next == count


@pytest.mark.usefixtures("small_parts")
def test_a_file_that_changes_while_it_is_loaded_ends_it(log: ObjectLog, files: Path) -> None:
    def change() -> None:
        (files / "part-0.jsonl").write_text("{}\n")

    with pytest.raises(InvalidInput, match="changed while it was loaded"):
        sl.bulk.load(files, log, job="a", key="id", pool=Interrupted(1, change))
    assert log.bounds().next == 0
    (files / "part-0.jsonl").write_text("[]\n")
    with pytest.raises(InvalidInput, match="is no JSON object"):
        sl.bulk.load(files, log, job="a", key="id")
    (files / "part-0.jsonl").write_text('{"id":0}\n')
    assert sl.bulk.load(files, log, job="a", key="id").records == 21, (
        "the job was refused, though the file is right now"
    )


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"id":1}\n\n[1]\n', r"a\.jsonl, line 3, is no JSON object"),
        ("a.jsonl", '{"id": "\ud800"}\n', "is no JSON object"),
        ("a.jsonl", "{} {}\n", "is no JSON object"),
        ("a.csv", "id,b\n1\n", "cannot be read as csv"),
        ("a.csv", "b\n1\n", "has no column 'id'"),
        ("a.parquet", "PAR1", "cannot be read as parquet"),
        ("a.arrow", "ARROW1", "cannot be read as arrow"),
        ("a.jsonl.gz", "no gzip", "cannot be read as jsonl"),
        ("a.txt", "x", "does not say its format"),
        ("a.parquet.gz", "x", "compressed as a whole"),
    ],
)
def test_what_cannot_be_a_record_is_named_and_nothing_is_appended(
    log: ObjectLog, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidInput, match=says):
        sl.bulk.load(tmp_path / "in", log, job="a", key="id")
    assert log.bounds().next == 0


def test_wrong_operations_and_times_are_refused(log: ObjectLog, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"op": "upsert", "at": "2026-11-01T12:00:00"}\n')
    with pytest.raises(InvalidInput, match="has the operation 'upsert'"):
        sl.bulk.load(path, log, job="a", op="op")
    with pytest.raises(
        InvalidInput, match="has the time '2026-11-01T12:00:00': use one with its zone, such as 2026-11-"
    ):
        sl.bulk.load(path, log, job="b", timestamp="at")
    pq.write_table(pa.table({"at": pa.array([1], pa.timestamp("us"))}), tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match="has no time zone"):
        sl.bulk.load(tmp_path / "a.parquet", log, job="c", timestamp="at")


def test_an_object_may_lack_its_key_and_an_absent_value_is_a_null(log: ObjectLog, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": null}\n{"value": 2}\n{"id": ""}\n')
    sl.bulk.load(path, log, job="a", key="id", value="value")
    assert pairs(log) == [(None, None), (None, b"2"), (b"", None)]


def test_a_place_without_files_and_another_log_are_refused(log: ObjectLog, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file at"):
        sl.bulk.load(tmp_path / "nothing", log, job="a")
    with sl.open(f"wal://{tmp_path}/wal", create=True) as wal, pytest.raises(Unsupported, match="'strandline ingest'"):
        sl.bulk.load(tmp_path, wal, job="a")


def test_a_file_without_rows_is_loaded_as_nothing(log: ObjectLog, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    assert sl.bulk.load(tmp_path / "a.jsonl", log, job="a").records == 0


@pytest.mark.matrix
def test_cells_of_csv_may_have_several_lines_and_megabytes(log: ObjectLog, tmp_path: Path) -> None:
    lines = "".join(f'{row},"one\n{row},two"\n' for row in range(100_000))
    (tmp_path / "rows.csv").write_text(f"id,text\n{lines}last,{'x' * 3_000_000}\n")
    assert sl.bulk.load(tmp_path / "rows.csv", log, job="a", key="id", value="text").records == 100_001
    found = pairs(log)
    assert found[:-1] == [(b"%d" % row, b"one\n%d,two" % row) for row in range(100_000)]
    assert found[-1] == (b"last", b"x" * 3_000_000)


def test_columns_of_a_dictionary_are_plain_values(log: ObjectLog, tmp_path: Path) -> None:
    """As pandas writes categories."""
    city = pa.array(["Ulm", "Bonn", None, "Ulm"]).dictionary_encode()
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "city": city}), tmp_path / "rows.parquet")
    sl.bulk.load(tmp_path / "rows.parquet", log, job="a", key="city")
    assert pairs(log)[1] == (b"Bonn", b'{"id":2,"city":"Bonn"}')
    assert [key for key, _ in pairs(log)] == [b"Ulm", b"Bonn", None, b"Ulm"]


def test_a_line_that_nests_too_deeply_is_refused_in_one_sentence(log: ObjectLog, tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(InvalidInput, match="line 1, is no JSON object"):
        sl.bulk.load(tmp_path / "deep.jsonl", log, job="a")


def test_the_folder_of_an_export_is_loaded_without_its_plan_and_only_when_it_is_whole(
    log: ObjectLog, tmp_path: Path
) -> None:
    source = sl.open(f"file://{tmp_path}/source", create=True)
    with source.producer(linger=0) as producer:
        for number in range(10):
            producer.append(key=b"\xff%d" % number, value=b"\x00" if number % 2 else None, headers={"h": b"\xfe"})
            producer.flush()
    done = sl.bulk.export(source, tmp_path / "out", part_bytes=1)
    manifest = tmp_path / "out" / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()
    with pytest.raises(InvalidInput, match="not finished"):
        sl.bulk.load(tmp_path / "out", log, job="a")
    manifest.write_bytes(kept)
    assert sl.bulk.load(tmp_path / "out", log, job="a").files == len(done.parts) > 1
    assert rows(log) == rows(source)


def test_a_folder_of_many_files_is_listed_no_more_often_than_one_of_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    calls = list[str]()
    listed = LocalStore.list

    def counted(self: LocalStore, prefix: str, **options: Any) -> Any:
        calls.extend([prefix] if self.url.endswith("/many") else [])
        return listed(self, prefix, **options)

    monkeypatch.setattr(LocalStore, "list", counted)
    counts = []
    for count in (2, 40):
        for number in range(count):
            (folder / f"{number:03d}.jsonl").write_text('{"id": 1}\n')
        sl.bulk.load(folder, sl.open(f"file://{tmp_path}/log-{count}", create=True), job="a", key="id")
        counts.append(len(calls))
        calls.clear()
        files = sorted(folder.iterdir())
        sl.bulk.load(files, sl.open(f"file://{tmp_path}/named-{count}", create=True), job="a", key="id")
        counts.append(len(calls))
        calls.clear()
    assert counts[:2] == counts[2:]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("marked.jsonl", b'\xef\xbb\xbf{"id":1}\n', [(b"1", b'{"id":1}')]),
        ("marked.csv", b"\xef\xbb\xbfid\n1\n", [(b"1", b'{"id":"1"}')]),
        ("mark-only.jsonl", b"\xef\xbb\xbf", []),
        ("short.jsonl", b"\n", []),
        ("empty.csv", b"", []),
        ("members.jsonl.gz", 2 * gzip.compress(b'{"id":1}\n', mtime=0), 2 * [(b"1", b'{"id":1}')]),
    ],
)
def test_files_of_other_programs_are_read_with_their_marks_and_without_rows(
    log: ObjectLog, tmp_path: Path, name: str, data: bytes, expected: list[tuple[bytes, bytes]]
) -> None:
    (tmp_path / name).write_bytes(data)
    sl.bulk.load(tmp_path / name, log, job="a", key="id")
    assert pairs(log) == expected


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ä b", "class"])
def test_a_field_may_have_any_name(log: ObjectLog, tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({name: "k", "v": 1}) + "\n{}\n")
    sl.bulk.load(tmp_path / "rows.jsonl", log, job="a", key=name, value="v")
    assert pairs(log) == [(b"k", b"1"), (None, None)]


@pytest.mark.parametrize("fields", [{"key": "ident"}, {"key": "id", "value": "nam"}, {"key": ""}])
def test_a_field_of_the_key_or_the_value_that_no_line_has_is_refused(
    log: ObjectLog, files: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match=r"part-0.jsonl has no field '\w*' in its first 10 objects"):
        sl.bulk.load(files, log, job="a", **fields)
    assert log.bounds().next == 0


def test_names_that_are_no_text_are_refused_in_one_sentence(log: ObjectLog, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    with open(bytes(folder) + b"/\xff.jsonl", "wb") as file:
        file.write(b"{}\n")
    with pytest.raises(InvalidInput, match="is not UTF-8: rename the file"):
        sl.bulk.load(folder, log, job="a")
    (tmp_path / "latin.csv").write_bytes("größe\n1\n".encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"latin\.csv cannot be read as csv: 'utf-8' codec"):
        sl.bulk.load(tmp_path / "latin.csv", log, job="a")
    (tmp_path / "twice.csv").write_text("id,id\n1,2\n")
    with pytest.raises(SchemaRefused, match=r"twice\.csv cannot be loaded: The field 'id'"):
        sl.bulk.load(tmp_path / "twice.csv", log, job="a")


def test_a_load_that_another_process_finishes_meanwhile_answers_as_that_one(files: Path) -> None:
    class Beside(PlainStore):
        """Another process finishes the job just before this one copies what it has staged."""

        def get(self, path: str) -> Any:
            if path.endswith(".batch") and not self.is_over:
                self.is_over = True
                sl.bulk.load(files, open_log(self), job="a", key="id")
            return super().get(path)

        is_over = False

    log = open_log(Beside(), create=True)
    done = sl.bulk.load(files, log, job="a", key="id")
    assert (done.records, done.first, log.bounds().next) == (30, 0, 30)
    assert not list(log.store.list("staged/"))
