"""Ingests from the shell."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import strandline as sl
from strandline.log.wal.log import WalLog
from tests.cli.conftest import Run, Start
from tests.cli.logs.test_lag import fill_queue
from tests.ingestion.sources import append, changes, content, fill, position


def test_a_log_is_ingested_into_a_write_ahead_log_once(run: Run, log: str, tmp_path: Path) -> None:
    source = sl.open(log, create=True)
    fill(source)
    target = f"wal://{tmp_path}/wal"
    done = run("ingest", log, target)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("100 records ingested in ")
    assert done.stdout.endswith("the target holds the source up to position 100, and ends at offset 100.\n")
    append(source, changes(5, 100), number=4)
    again = json.loads(run("ingest", log, target, "--json").stdout)
    assert (again["records"], again["next"], again["target_next"], again["finished"]) == (5, 105, 105, True)
    assert run("ingest", log, f"{tmp_path}/wal").stdout.startswith("There was nothing to ingest: ")
    back = run("ingest", f"{tmp_path}/wal", f"{tmp_path}/copy", "--retention", "consumed")
    assert back.exit_code == 0, back.output
    assert content(sl.open(f"{tmp_path}/copy")).equals(content(source))


def test_a_queue_is_ingested_batch_by_batch(run: Run, log: str, tmp_path: Path) -> None:
    queue = fill_queue(log, 5)
    done = run("ingest", log, f"wal://{tmp_path}/wal", "--format", "queue-v1")
    assert done.exit_code == 0, done.output
    with WalLog.open(tmp_path / "wal") as wal:
        assert content(wal).column("value").to_pylist() == [b"0", b"1", b"2", b"3", b"4"]
        assert position(queue, wal) == 5
    assert queue.bounds().count == 5
    fill_queue(log, 2)
    again = json.loads(run("ingest", log, f"wal://{tmp_path}/wal", "--format", "queue-v1", "--json").stdout)
    assert (again["records"], again["next"]) == (2, 7)


def test_lost_records_are_skipped_only_if_that_is_said(run: Run, log: str, tmp_path: Path) -> None:
    with WalLog.open(log) as source:
        fill(source, batches=2)
    assert run("ingest", log, tmp_path / "copy").exit_code == 0
    with WalLog.open(log) as source:
        for number in (2, 3):
            append(source, changes(25, number * 25), number=number)
        source.trim(75)
    refused = run("ingest", log, tmp_path / "copy")
    assert refused.exit_code == 1
    assert "--skip-trimmed" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert run("ingest", log, tmp_path / "copy", "--skip-trimmed").stdout.startswith("25 records ingested")


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("kafka://127.0.0.1:1", "{}/copy", "names no topic"),
        ("nats://127.0.0.1:1/a/b", "{}/copy", "names no stream"),
        ("{}/nothing", "{}/copy", "no log at {}/nothing (there is no such folder): check the address"),
        ("grcp://a:1", "{}/copy", "did you mean grpc://"),
        ("memory://ingest-cli-nowhere", "{}/copy", "check the address"),
    ],
)
def test_a_wrong_address_is_one_sentence_and_makes_nothing(
    run: Run, tmp_path: Path, source: str, target: str, words: str
) -> None:
    done = run("ingest", source.format(tmp_path), target.format(tmp_path))
    assert done.exit_code == 1
    assert words.format(tmp_path) in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "copy").exists()


@pytest.mark.matrix
def test_following_ends_at_ctrl_c_with_everything_appended(start: Start, log: str, tmp_path: Path) -> None:
    source = sl.open(log, create=True)
    target = sl.open(tmp_path / "copy", create=True)
    fill(source, batches=2)
    process = start("ingest", log, target.url, "--follow", "--json")
    assert target.wait(target.start().at(49), timeout=120)
    append(source, changes(25, 50), number=2)
    assert target.wait(target.start().at(74), timeout=120)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["next"] == 75
    assert content(target).equals(content(source))
    (slot,) = source.slots.list()
    assert slot.position == 75


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["wal", "object"])
def test_an_ingest_that_is_killed_again_and_again_doubles_and_loses_nothing(
    start: Start, run: Run, log: str, tmp_path: Path, kind: str
) -> None:
    source = sl.open(log, create=True)
    for number in range(60):
        append(source, changes(500, number * 500), number=number)
    target = f"wal://{tmp_path}/copy" if kind == "wal" else f"{tmp_path}/copy"
    ends = []
    for life in range(6):
        process = start("ingest", log, target, "--follow")
        append(source, changes(500, (60 + life) * 500), number=60 + life)
        seen = sl.log.WalReader if kind == "wal" else sl.open
        wait_until(lambda seen=seen: grown(seen, tmp_path / "copy", ends))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
    assert run("ingest", log, target).exit_code == 0
    copy = sl.open(target, **({"read_only": True} if kind == "wal" else {}))
    assert content(copy).equals(content(source))


def grown(opened, folder, ends):
    try:
        end = opened(str(folder)).bounds().next
    except sl.errors.StrandlineError:
        return False
    if end <= max(ends, default=0):
        return False
    ends.append(end)
    return True


def wait_until(condition, seconds=120.0):
    import time

    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
