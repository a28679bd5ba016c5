"""Verifying from the shell; what is found is tried in tests/log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import strandline as sl
from strandline.cli.logs.verify import summary
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from tests.cli.conftest import Run
from tests.cli.logs.test_slots import fill


def test_a_healthy_log_is_clean(run: Run, log: str) -> None:
    fill(log).slots.create("billing", 3)
    done = run("verify", log)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith("clean: 10 records read (")
    fields = json.loads(run("verify", log, "--quick", "--json").stdout)
    assert fields["clean"] is True
    assert fields["quick"] is True
    assert (fields["damage"], fields["waste"], fields["note"], fields["findings"]) == (0, 0, 0, [])
    assert fields["examined"]["batches"] == 10


def test_damage_is_named_and_ends_with_status_1(run: Run, log: str) -> None:
    location = fill(log).head().tail[3].location
    path = Path(log) / location
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    done = run("verify", log)
    assert done.exit_code == 1
    assert location in done.stdout
    assert "its checksum is wrong" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("DAMAGED: ")
    assert run("verify", log, "--quick").exit_code == 0  # its size is right
    path.unlink()
    quick = run("verify", log, "--quick", "--json")
    assert quick.exit_code == 1
    (finding,) = json.loads(quick.stdout)["findings"]
    assert (finding["severity"], finding["kind"], finding["where"]) == ("damage", "batch", location)


def test_tables_are_compared_with_the_log(run: Run, log: str, tmp_path: Path) -> None:
    opened = fill(log)
    sl.follow(opened, sl.DeltaSink(tmp_path / "table", mode="append"), upto="end")
    done = run("verify", log, "--table", str(tmp_path / "table"), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["examined"]["rows"] == 10
    (Path(log) / opened.head().tail[3].location).unlink()
    done = run("verify", log)
    assert done.exit_code == 1
    assert "Offsets 3 to 3 cannot be read" in done.stdout
    assert "leave out one" in run("verify", log, "--table", str(tmp_path / "table"), "--quick").stderr


def test_of_a_write_ahead_log_the_files_are_checked(run: Run, tmp_path: Path) -> None:
    with sl.open(f"wal://{tmp_path}/wal", create=True) as opened, opened.producer() as producer:
        producer.append(value=b"1")
    done = run("verify", str(tmp_path / "wal"), "--json")
    assert (done.exit_code, json.loads(done.stdout)["examined"]["records"]) == (0, 1)
    (index,) = (tmp_path / "wal").glob("*.index")
    index.write_bytes(b"damaged")
    kinds = {
        finding["kind"] for finding in json.loads(run("verify", str(tmp_path / "wal"), "--json").stdout)["findings"]
    }
    assert "index" in kinds


def test_waste_and_notes_are_reported_and_are_no_failure(run: Run, log: str) -> None:
    opened = fill(log)
    opened.store.put(f"batches/{0:016d}/{'f' * 32}.batch", b"x")
    done = run("verify", log)
    assert done.exit_code == 0
    assert "note  " in done.stdout
    assert "1 note" in done.stdout.splitlines()[-1]


def test_a_damaged_head_or_identity_is_a_finding(run: Run, log: str) -> None:
    fill(log)
    for name, kind in (("head", "head"), ("log.json", "identity")):
        (Path(log) / name).write_bytes(b"{")
        done = run("verify", log, "--json")
        assert done.exit_code == 1
        (finding,) = json.loads(done.stdout)["findings"]
        assert (finding["kind"], finding["where"]) == (kind, name)


def test_of_many_findings_of_a_kind_the_first_are_shown_and_all_are_counted() -> None:
    report = Verification("u", most=3)
    report.take(Finding(Severity.WASTE, FindingKind.ORPHAN, f"o{number}", "x") for number in range(1000))
    report.take([Finding(Severity.NOTE, FindingKind.SLOT, "s", "x")])
    assert [finding.where for finding in report.findings] == ["o0", "o1", "o2", "s"]
    assert (report.count(Severity.WASTE), report.count(Severity.NOTE), report.is_clean) == (1000, 1, True)


@pytest.mark.matrix
def test_on_a_terminal_there_is_progress_and_it_leaves_the_result_alone(
    on_terminal: Callable[..., tuple[int, str]], log: str
) -> None:
    fill(log)
    status, shown = on_terminal("verify", log)
    assert status == 0
    assert "reading" in shown
    assert "clean" in shown


def test_the_summary_counts_what_was_found() -> None:
    report = Verification("u", Counter(batches=1, records=2, bytes=3))
    report.take([Finding(Severity.DAMAGE, FindingKind.BATCH, "b", "x")])
    assert summary(report, quick=True) == "2 records listed (3 B), 1 batch; 1 damaged, no waste, no notes"
