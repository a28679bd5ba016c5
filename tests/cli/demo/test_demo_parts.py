"""The demo's parts that need no Spark: the changes, the truth and the report."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pyarrow as pa
import pytest
from rich.console import Console

import strandline as sl
from strandline.cli.demo import command, picture
from strandline.cli.demo.changes import ORDER, Change, DemoWorkload, changes
from strandline.cli.demo.command import Demo
from strandline.cli.demo.comparison import (
    ChangesDifference,
    Comparison,
    StateDifference,
    Truth,
    as_table,
    compare_changes,
    compare_state,
    folded,
    producers_of,
    truth,
    values_of,
)
from strandline.cli.demo.page import page
from strandline.cli.demo.processes import DemoFolder, Process, ProcessGroup, failure_in
from strandline.cli.demo.report import DemoEvent, DemoResult, Sample, event_line, summary
from strandline.cli.demo.workers import table_of
from strandline.cli.logs.lag import current_lag
from strandline.errors import NotReady, StrandlineError
from strandline.storage.retry import Backoff
from tests.cli.conftest import Run

SMALL = DemoWorkload(records=6000, keys=400, producers=3, seed=7)


def streams(workload: DemoWorkload) -> list[list[Change]]:
    return [list(changes(workload, producer)) for producer in range(workload.producers)]


def interleaved(workload: DemoWorkload, seed: int) -> list[Change]:
    """All producers' changes in some order that keeps each producer's own."""
    chance = random.Random(seed)
    waiting = [iter(stream) for stream in streams(workload)]
    turns = [index for index in range(workload.producers) for _ in range(workload.share(index))]
    chance.shuffle(turns)
    return [next(waiting[turn]) for turn in turns]


def stored(rows: Sequence[tuple[int, Change]]) -> pa.Table:
    """Changes and their offsets, as a table of all changes holds them."""
    return as_table([change for _, change in rows]).append_column(
        "offset", pa.array([at for at, _ in rows], pa.int64())
    )


def all_stored(workload: DemoWorkload, seed: int) -> pa.Table:
    return stored(list(enumerate(interleaved(workload, seed))))


# --- the generator ---------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_the_changes_are_the_same_in_every_process() -> None:
    code = (
        "import hashlib; from strandline.cli.demo.changes import *;"
        f"print(hashlib.sha256(repr([list(changes({SMALL!r}, p)) for p in range(3)]).encode()).hexdigest())"
    )
    expected = hashlib.sha256(repr(streams(SMALL)).encode()).hexdigest()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, timeout=600, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert done.stdout.strip() == expected


def test_another_seed_makes_other_changes() -> None:
    assert streams(SMALL) != streams(replace(SMALL, seed=8))


@pytest.mark.parametrize("producers", [1, 3, 7])
def test_each_key_belongs_to_one_producer_and_the_shares_add_up(producers: int) -> None:
    workload = replace(SMALL, producers=producers)
    made = streams(workload)
    assert sum(map(len, made)) == workload.records
    for producer, stream in enumerate(made):
        keys = pa.chunked_array([[key for key, _ in stream]])
        assert set(producers_of(keys, producers).to_pylist()) == {producer}
    assert len({key for stream in made for key, _ in stream}) == workload.keys


def test_an_order_is_created_updated_shipped_and_deleted_in_that_order() -> None:
    allowed = {
        None: {"created"},
        "created": {"updated", "shipped"},
        "updated": {"updated", "shipped"},
        "shipped": {None},
    }
    states: dict[bytes, str | None] = {}
    seen = set()
    for stream in streams(SMALL):
        for key, value in stream:
            status = None if value is None else json.loads(value)["status"]
            assert status in allowed[states.get(key)]
            states[key] = status
            seen.add(status)
            assert value is None or 80 < len(value) < 120
    assert seen == {None, "created", "updated", "shipped"}


# --- the truth -------------------------------------------------------------------------------------------------


def test_the_truth_does_not_depend_on_how_producers_interleave() -> None:
    expected = truth(SMALL)
    for seed in range(3):
        assert folded(interleaved(SMALL, seed)) == expected.latest


def test_the_truth_is_what_a_fold_of_a_real_log_gives_and_the_log_s_history_passes() -> None:
    log = sl.open("memory://demo-truth", create=True)
    with log.producer() as producer:
        stream = interleaved(SMALL, 5)
        for start in range(0, len(stream), 250):
            producer.append_batch(table_of(stream[start : start + 250]))
    rows = [row for batch in log.read() for row in batch.to_pylist()]
    latest: dict[bytes, bytes] = {}
    for row in rows:
        latest.pop(row["key"], None)
        if row["op"] == sl.Op.PUT:
            latest[row["key"]] = row["value"]
    expected = truth(SMALL)
    assert compare_state(list(latest), list(latest.values()), expected.latest).exact
    assert compare_changes(stored([(row["offset"], (row["key"], row["value"])) for row in rows]), expected).exact


def test_deletes_matter_in_the_truth() -> None:
    expected = truth(SMALL)
    touched = {key for stream in streams(SMALL) for key, _ in stream}
    assert 0 < len(expected.latest) < len(touched)


BROKEN_STATES = {
    "missing": lambda rows: rows.pop(),
    "extra": lambda rows: rows.append((b"order-9999999", b"{}")),
    "different": lambda rows: rows.append((rows.pop()[0], b"{}")),
    "doubled": lambda rows: rows.append(rows[0]),
}


@pytest.mark.parametrize("fault", BROKEN_STATES)
def test_a_table_with_one_fault_is_found_out(fault: str) -> None:
    expected = truth(SMALL)
    rows = list(expected.latest.items())
    BROKEN_STATES[fault](rows)
    found = compare_state([key for key, _ in rows], [value for _, value in rows], expected.latest)
    assert not found.exact
    assert {name for name in BROKEN_STATES if getattr(found, name)} == {fault}


def swap(rows: list[tuple[int, Change]]) -> None:
    key = rows[0][1][0]
    other = next(index for index in range(1, len(rows)) if rows[index][1][0] == key)
    rows[0], rows[other] = (rows[0][0], rows[other][1]), (rows[other][0], rows[0][1])


BROKEN_HISTORIES = {
    "lost": lambda rows: rows.pop(10),
    "doubled": lambda rows: rows.insert(10, rows[10]),
    "disordered": swap,
}


@pytest.mark.parametrize("fault", BROKEN_HISTORIES)
def test_a_history_with_one_fault_is_found_out(fault: str) -> None:
    rows = list(enumerate(interleaved(SMALL, 1)))
    assert compare_changes(stored(rows), truth(SMALL)).exact
    BROKEN_HISTORIES[fault](rows)
    found = compare_changes(stored(rows), truth(SMALL))
    assert not found.exact
    assert getattr(found, fault) == 1


def test_no_changes_lack_all_of_the_truth() -> None:
    assert compare_changes(stored([]), truth(SMALL)) == ChangesDifference(0, SMALL.records, 0, SMALL.producers)


def test_typed_rows_become_the_very_values_that_were_produced() -> None:
    produced = [value for stream in streams(SMALL) for _, value in stream if value is not None]
    columns = sl.values.Json(ORDER).decode(pa.array(produced, pa.binary())).columns
    assert values_of(pa.table(columns)).to_pylist() == produced


def test_a_value_that_is_deleted_instead_is_found_out() -> None:
    change = (b"order-0000000", b"x")
    expected = Truth({}, (as_table([change]),))
    assert compare_changes(stored([(0, change)]), expected).exact
    assert not compare_changes(stored([(0, (change[0], None))]), expected).exact


# --- the summary -----------------------------------------------------------------------------------------------


def finished() -> DemoResult:
    state = StateDifference(rows=90, missing=0, extra=0, different=0, doubled=0)
    made = ChangesDifference(rows=1000, lost=0, doubled=0, disordered=0)
    result = DemoResult(DemoWorkload(1000, 100, 3, 7), seconds=12.5)
    result.samples = [
        Sample(float(t), min(1000, 100 * t), 80 * t, 90 * t, 0 if t < 6 else 1000, 0 if t in {4, 5} else 1)
        for t in range(12)
    ]
    result.events = [
        DemoEvent(0.0, "start", "it <starts> & runs"),
        DemoEvent(1.0, "up", "Spark is up"),
        DemoEvent(4.0, "kill", "SIGKILL"),
        DemoEvent(4.1, "checkpoint", "the checkpoint is deleted"),
        DemoEvent(5.5, "up", "Spark is up again"),
        DemoEvent(6.0, "join", "one joins late"),
        DemoEvent(11.0, "done", "done"),
    ]
    log = sl.open("memory://demo-lag", create=True)
    if not log.slots.list():
        with log.producer() as producer:
            producer.produce([b"x"] * 1000)
        log.slots.create("stalled-report", 50)
    result.lag = current_lag(log)
    wrong = replace(state, missing=12345, different=7)
    lossy = ChangesDifference(rows=900, lost=54321, doubled=17, disordered=3)
    result.comparison = Comparison(90, state, made, lossy, wrong)
    return result


def shown(result: DemoResult, columns: int = 140) -> str:
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    console.print(summary(result))
    return console.file.getvalue()


def test_the_summary_holds_what_was_found() -> None:
    text = shown(finished())
    for expected in ("EXACT", "54,321", "12,345", "stalled-report", "pins the floor"):
        assert expected in text


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def test_the_page_is_well_formed_and_holds_what_was_found() -> None:
    root = parsed(page(finished()))
    text = "".join(root.itertext())
    for expected in ("EXACT", "54,321", "12,345", "it <starts> & runs", "stalled-report", "pins the floor"):
        assert expected in text
    assert "the checkpoint is deleted" in text
    assert "pre" not in {element.tag for element in root.iter()}, "a page, not the text of a terminal"


def test_the_page_needs_nothing_but_itself() -> None:
    text = page(finished())
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\(|\bsrc=|\bhref=", text)
    assert not re.findall(r"https?://[^\s\"']+", text)
    assert "color-scheme: light dark" in text


def test_the_picture_shows_each_reader_the_kills_and_the_outages() -> None:
    root = parsed(page(finished()))
    (shown,) = root.iter("svg")
    assert [len(line.attrib["points"].split()) for line in shown.iter("polyline")] == [12] * 4
    assert [line.attrib["class"] for line in shown.iter("line")].count("kill") == 1
    (outage, _key) = [box for box in shown.iter("rect") if box.attrib.get("class") == "down"]
    assert float(outage.attrib["width"]) > 0
    assert "SIGKILL" in "".join(shown.itertext())


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert ET.fromstring(picture.drawn([], [])).tag == "svg"


def test_a_wrong_result_is_called_wrong() -> None:
    result = finished()
    result.comparison = replace(result.comparison, orders=replace(result.comparison.orders, doubled=1))
    assert "WRONG" in shown(result)
    assert result.fields()["verdict"] == "WRONG"


def test_a_naive_twin_that_is_right_by_chance_is_reported_as_right() -> None:
    result = finished()
    result.comparison = replace(
        result.comparison, naive=result.comparison.changes, naive_state=result.comparison.orders
    )
    assert "happens to be right" in shown(result)
    assert result.fields()["naive_wrong"] is False


@pytest.mark.parametrize(("doubled", "status"), [(0, 0), (1, 1)])
def test_the_demo_s_status_is_its_verdict_and_its_report_is_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, doubled: int, status: int
) -> None:
    result = finished()
    result.comparison = replace(result.comparison, orders=replace(result.comparison.orders, doubled=doubled))
    monkeypatch.setattr(command, "_run", lambda *_, **__: result)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = run("demo")
    assert done.exit_code == status, done.output
    assert ("WRONG" if status else "EXACT: all tables") in done.stdout
    (home,) = tmp_path.iterdir()
    assert home.stat().st_mode & 0o777 == 0o700
    (report,) = home.iterdir()
    assert done.stdout.splitlines()[-1] == f"Report: {report}"
    assert report.suffix == ".html"
    assert run("demo", "--dir", tmp_path / "kept").exit_code == status
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


def test_the_demo_writes_through_no_link_beside_its_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    made = tempfile.mkdtemp

    def watched(**options: str) -> str:
        home = made(**options)
        Path(f"{home}.html").symlink_to(mine)  # by somebody who watches the folder of temporary files
        return home

    monkeypatch.setattr(command, "_run", lambda *_: finished())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", watched)
    assert run("demo").exit_code == 0
    assert mine.read_text() == "mine"


def test_the_rate_of_spark_is_that_of_its_best_five_seconds() -> None:
    result = finished()
    applied = [0, 0, 0, 100, 200, 300, 400, 500, 500, 500, 510]
    result.samples = [Sample(float(t), 1000, orders, 0, 0, 1) for t, orders in enumerate(applied)]
    assert result.rates()["followed"] == pytest.approx(100)


@pytest.mark.parametrize("columns", [80, 140])
def test_the_summary_fits(columns: int) -> None:
    console = Console(record=True, file=io.StringIO(), width=columns, highlight=False, markup=False)
    result = finished()
    result.samples = [replace(result.samples[-1], at=float(t), produced=1_000_000, orders=0) for t in range(90)]
    console.print(*map(event_line, result.events), summary(result), sep="\n")
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= columns


def test_a_result_is_json() -> None:
    assert json.loads(json.dumps(finished().fields()))["results"]["naive"]["lost"] == 54321


# --- what went wrong -----------------------------------------------------------------------------------------------

JAVA = """Setting default log level to "WARN".
Traceback (most recent call last):
  File "/usr/lib/pipeline.py", line 9, in <module>
    query.start()
pyspark.errors.exceptions.captured.StreamingQueryException: [STREAM_FAILED] Query terminated with exception: no space

JVM stacktrace:
org.apache.spark.sql.streaming.StreamingQueryException
\tat org.apache.spark.sql.execution.streaming.StreamExecution.runStream(StreamExecution.scala:1)
Caused by: java.io.IOException: No space left on device
\tat java.base/sun.nio.ch.FileDispatcherImpl.write0(Native Method)
\t... 24 more
"""


@pytest.mark.parametrize(
    ("printed", "why"),
    [
        (JAVA, "Caused by: java.io.IOException: No space left on device."),
        ("Traceback (most recent call last):\n  File 'x'\nValueError: wrong\n", "ValueError: wrong."),
        ("Traceback\nstrandline.errors.Gap: There is a gap.\n\tat a.b(c)\n", "There is a gap."),
        ("one\ntwo\n", "two."),
        ("", "it printed nothing."),
    ],
)
def test_a_process_that_failed_prints_its_error_and_no_stack_trace(printed: str, why: str) -> None:
    assert failure_in(printed) == why


def test_a_child_that_fails_says_why_in_one_sentence_and_where_all_it_printed_is(tmp_path: Path) -> None:
    module = tmp_path / "fails.py"
    module.write_text(f"import sys\nsys.stderr.write({JAVA!r})\nsys.exit(3)\n")
    with ProcessGroup() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        child = processes.start("spark", "fails", [], tmp_path / "spark.txt")
        child._process.wait(30)
        with pytest.raises(StrandlineError) as failed:
            processes.check()
    assert str(failed.value) == (
        "The demo's process 'spark' ended with status 3: Caused by: java.io.IOException: No space left on device. "
        f"All that it printed is in {tmp_path / 'spark.txt'}."
    )


NOT_CONNECTED = "org.apache.spark.SparkException: Python worker failed to connect back.\n"
FLAKY = """
import pathlib, sys, time
from strandline.cli.demo.processes import DemoFolder, exit_with_parent, write_marker
folder, run = DemoFolder(pathlib.Path(sys.argv[1])), int(sys.argv[2])
starts = folder.path / "starts"
tries = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (tries + 1))
if tries < {failures}:
    sys.exit({said!r})
exit_with_parent()
write_marker(folder.up(run))
time.sleep(600)
"""


class FlakySpark(ProcessGroup):
    """Starts a process in place of Spark, which fails some times before it is up."""

    def start(self, name: str, module: str, arguments: list[str], output: Path) -> Process:
        assert module == "strandline.cli.demo.pipeline"
        return super().start(name, "flaky", arguments, output)


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], Demo]]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(command, "_START", Backoff(attempts=3, base=0.01))
    monkeypatch.setattr(command, "_POLL", 0.01)
    with FlakySpark() as processes:

        def make(failures: int, said: str) -> Demo:
            (tmp_path / "flaky.py").write_text(FLAKY.format(failures=failures, said=said))
            return Demo(DemoWorkload(1000, 10, 1, 7), DemoFolder(tmp_path / "demo"), processes, lambda _: None)

        yield make


def test_a_start_of_spark_that_fails_is_tried_again_and_the_report_tells_of_it(flaky, tmp_path: Path) -> None:
    demo = flaky(2, NOT_CONNECTED)
    assert demo._start_spark(1).running
    assert [event.kind for event in demo.result.events] == ["retry", "retry", "up"]
    assert "Python worker failed to connect back" in demo.result.events[0].text
    assert len((tmp_path / "demo" / "starts").read_text()) == 3


def test_a_spark_that_never_starts_ends_the_demo_with_one_sentence(flaky, tmp_path: Path) -> None:
    demo = flaky(9, NOT_CONNECTED)
    with pytest.raises(
        NotReady, match=r"did not start in 3 tries: .*failed to connect back\. Run the demo again"
    ) as ended:
        demo._start_spark(1)
    assert str(tmp_path / "demo" / "output") in str(ended.value)
    assert not DemoFolder(tmp_path / "demo").up(1).exists()
    assert len((tmp_path / "demo" / "starts").read_text()) == 3


def test_a_start_that_we_refuse_ourselves_is_not_tried_again(flaky, tmp_path: Path) -> None:
    demo = flaky(9, "strandline.errors.MissingExtra: Spark needs Java 17 or 21.")
    with pytest.raises(StrandlineError, match="Spark needs Java 17 or 21"):
        demo._start_spark(1)
    assert len((tmp_path / "demo" / "starts").read_text()) == 1
