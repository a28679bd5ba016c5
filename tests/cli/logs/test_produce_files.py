"""Appending files row by row, each row once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.bulk import appending
from strandline.bulk.appending import FileAppender
from strandline.bulk.load_files import RecordFields
from strandline.bulk.load_sources import files_at
from tests.cli.conftest import Run, Start

ROWS = pa.table(
    {
        "id": ["1", "2", "3"],
        "city": ["Rome", "Oslo", None],
        "op": ["put", "delete", "put"],
        "at": ["2026-01-15T05:29:00Z"] * 3,
        "region": ["south", "north", None],
    }
)


def written(folder: Path, kind: str) -> Path:
    place = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            place.write_text("".join(json.dumps(row) + "\n" for row in ROWS.to_pylist()))
        case "csv":
            pyarrow.csv.write_csv(ROWS, place)
        case "parquet":
            pq.write_table(ROWS, place)
        case "arrow":
            pyarrow.feather.write_feather(ROWS, place, compression="uncompressed")
    return place


def records(url: str) -> list[dict[str, object]]:
    opened = sl.open(url)
    assert not isinstance(opened, sl.compat.QueueLog)
    return [row for batch in opened.read() for row in batch.to_pylist(maps_as_pydicts="strict")]


def numbered(place: Path, count: int) -> Path:
    place.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(count)))
    return place


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow"])
def test_rows_of_a_file_become_records_with_key_operation_time_and_headers(
    run: Run, log: str, tmp_path: Path, kind: str
) -> None:
    options = ["--key", "id", "--op", "op", "--timestamp", "at", "--headers", "region"]
    done = run("produce", log, written(tmp_path, kind), "--create", *options)
    assert done.exit_code == 0, done.output
    found = records(log)
    assert [(row["key"], row["op"]) for row in found] == [(b"1", 0), (b"2", int(sl.Op.DELETE)), (b"3", 0)]
    assert [row["headers"] or {} for row in found] == [{"region": b"south"}, {"region": b"north"}, {}]
    assert {str(row["timestamp"]) for row in found} == {"2026-01-15 05:29:00+00:00"}
    value = json.loads(str(found[0]["value"], "utf-8"))  # type: ignore[call-overload]
    assert (value["id"], value["city"]) == ("1", "Rome")


@pytest.mark.parametrize("kind", ["wal", "object"])
def test_a_file_is_appended_once_and_goes_on_with_resume(run: Run, log: str, tmp_path: Path, kind: str) -> None:
    url = f"wal://{log}" if kind == "wal" else log
    lines = numbered(tmp_path / "in.jsonl", 3)
    assert run("produce", url, lines, "--create").exit_code == 0
    again = run("produce", url, lines)
    assert again.exit_code == 1
    assert "3 records of" in again.stderr
    assert "--resume" in again.stderr
    numbered(lines, 5)
    done = json.loads(run("produce", url, lines, "--resume", "--json").stdout)
    assert (done["records"], done["stored"], done["next"]) == (2, 5, 5)
    nothing = run("produce", url, lines, "--resume")
    assert nothing.stdout.startswith("There was nothing to append: the log has all 5 records of ")
    numbered(lines, 2)
    shorter = run("produce", url, lines, "--resume")
    assert (shorter.exit_code, "it is another file" in shorter.stderr) == (1, True)
    assert run("produce", url, lines, "--source", "again").exit_code == 0
    assert [json.loads(str(row["value"], "utf-8"))["id"] for row in records(url)] == [0, 1, 2, 3, 4, 0, 1]  # type: ignore[call-overload]


def test_a_row_that_is_no_record_is_named_and_after_its_correction_the_rest_follows(
    run: Run, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "_AT_ONCE", 1)
    first, second = numbered(tmp_path / "1.jsonl", 3), tmp_path / "2.jsonl"
    second.write_text('{"id": 3}\n{"id":\n')
    stopped = run("produce", log, first, second, "--create", "--json")
    assert stopped.exit_code == 1
    assert json.loads(stopped.stdout)["stored"] == 3
    assert "2.jsonl, line 2, is no JSON object" in json.loads(stopped.stderr)["message"]
    second.write_text('{"id": 3}\n{"id": 4}\n')
    assert run("produce", log, first, second, "--resume").exit_code == 0
    assert [json.loads(str(row["value"], "utf-8"))["id"] for row in records(log)] == [0, 1, 2, 3, 4]  # type: ignore[call-overload]


def test_a_file_whose_first_row_is_bad_leaves_nothing_and_says_so(run: Run, log: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("[]\n")
    done = run("produce", log, tmp_path / "in.jsonl", "--create")
    assert (done.exit_code, records(log)) == (1, [])
    assert done.stdout.startswith("failed: the log has nothing of ")
    assert "repeat" not in done.stdout + done.stderr


def test_the_files_that_a_log_has_are_listed_by_their_names(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, numbered(tmp_path / "1.jsonl", 1), "--create")
    assert f"{tmp_path}/1.jsonl  position 1  last at offset 0" in run("sources", log).stdout


def test_the_number_of_a_bad_line_counts_empty_ones(run: Run, log: str, tmp_path: Path) -> None:
    (tmp_path / "schema").write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    run("create", log, "--schema", tmp_path / "schema")
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n\n{"id": "x"}\n')
    assert "in.jsonl, line 3, does not fit the log's schema" in run("produce", log, tmp_path / "in.jsonl").stderr


def test_a_stop_leaves_whole_appends_and_another_run_adds_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "_AT_ONCE", 1)
    for number in range(3):
        numbered(tmp_path / f"{number}.jsonl", 4)
    log, stop = sl.open("memory://produce-stop", create=True), threading.Event()
    files = files_at([str(tmp_path)], "jsonl")
    work = FileAppender(log, "rows", files, RecordFields())
    assert not work.run(resume=False, stop=stop, on_progress=lambda _: stop.set())
    assert (work.stored, log.bounds().next) == (4, 4)
    rest = FileAppender(log, "rows", files, RecordFields())
    assert rest.run(resume=True, stop=threading.Event(), on_progress=lambda _: None)
    assert (rest.appended, rest.stored, log.bounds().next) == (8, 12, 12)


@pytest.mark.matrix
def test_a_killed_append_is_resumed_with_each_row_once(run: Run, start: Start, log: str, tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    padding = "x" * 400
    lines.write_text("".join(json.dumps({"id": n, "padding": padding}) + "\n" for n in range(150_000)))
    run("create", log)
    process = start("produce", log, lines, "--key", "id")
    deadline, opened = time.monotonic() + 300, sl.open(log)
    while opened.bounds().next == 0:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait(timeout=60)
    killed_at = opened.bounds().next
    assert run("produce", log, lines, "--key", "id", "--resume").exit_code == 0
    keys = Counter(key for batch in opened.read() for key in batch.column("key").to_pylist())
    assert killed_at > 0
    assert keys == Counter({b"%d" % n: 1 for n in range(150_000)})


def test_a_file_of_this_folder_needs_no_slash(run: Run, log: str, tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 2)
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert run("produce", log, "in.jsonl", "--create").exit_code == 0
    finally:
        os.chdir(before)
    assert len(records(log)) == 2


@pytest.mark.parametrize(
    "arguments", [["in.jsonl", "--format", "lines"], ["in.jsonl", "--count", "3"], ["--key", "id"], ["--resume"]]
)
def test_options_of_files_and_of_standard_input_do_not_mix(run: Run, log: str, arguments: list[str]) -> None:
    done = run("produce", log, *arguments, "--create", given="")
    assert done.exit_code == 2
    assert not Path(log).exists()
