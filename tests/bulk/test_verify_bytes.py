"""Verification finds damage wherever it is: in any byte of a segment, in ``log.json``, in the events of a cold tier."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.bulk.span_checks import CheckTask
from strandline.cli.app import app
from strandline.formats.checksum import crc32c, joined_crc32c
from strandline.log.findings import FindingKind, Severity
from strandline.model.cursor import Limit
from strandline.tier.copy.segment_files import ColdSpan, forget_tails, plan_segment, segment_path
from strandline.tier.opening import attach, tiering
from tests.matrix_cases import some
from tests.tier.read.tiered_logs import Tiers


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget_tails()
    yield
    forget_tails()


def small_segment() -> tuple[Tiers, str, list[ColdSpan]]:
    """A log with one segment, of two row groups, since it has two terms."""
    tiers = Tiers("wal", terms=True)
    tiers.append(3, term=1)
    tiers.append(2, term=2)
    tiers.tier(target=1 << 20)
    (segment,) = tiers.finished()
    spans = plan_segment(tiers.plain, segment, 0)
    assert len(spans) == 2
    return tiers, segment_path(segment.segment, segment.start), spans


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.matrix) for part in range(1, 5))])
def test_every_changed_byte_of_a_segment_is_found(part: int) -> None:
    tiers, path, spans = small_segment()
    data = bytes(tiers.plain.get(path).data)
    task = CheckTask(0, 5, tuple(spans))
    assert not task().problems
    for at in range(part, len(data), 5):
        tiers.plain.put(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert task().problems, f"byte {at} of {len(data)}"


def test_bytes_after_a_segment_are_found() -> None:
    tiers, path, spans = small_segment()
    tiers.plain.put(path, bytes(tiers.plain.get(path).data) + b"PAR1")
    (problem,) = CheckTask(0, 5, tuple(spans))().problems
    assert "more than its" in problem.message


def test_a_part_of_a_segment_is_checked_with_all_that_belongs_to_no_part() -> None:
    tiers, path, spans = small_segment()
    data = bytes(tiers.plain.get(path).data)
    tiers.plain.put(path, b"X" + data[1:])  # Parquet's magic
    (problem,) = CheckTask(3, 5, tuple(spans[1:]))().problems
    assert "between its columns" in problem.message


def test_the_end_of_a_segment_that_was_read_before_is_read_again() -> None:
    tiers = Tiers("object", batches=8)
    tiers.tier()
    log = tiers.tiered()
    assert sl.bulk.verify(log).is_clean
    segment = tiers.finished()[0]
    path = segment_path(segment.segment, segment.start)
    data = bytes(tiers.plain.get(path).data)
    tiers.plain.put(path, data[:-12] + bytes([data[-12] ^ 1]) + data[-11:])
    assert {finding.kind for finding in sl.bulk.verify(log).damage} == {FindingKind.SEGMENT}


def test_checksums_of_parts_make_that_of_the_whole() -> None:
    data = bytes(range(256)) * 5
    for at in (0, 1, 7, 255, 1000, len(data)):
        first, second = data[:at], data[at:]
        assert joined_crc32c(crc32c(first), crc32c(second), len(second)) == crc32c(data)


# --- files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A log in a folder, whose first two batches are in segments alone."""
    url = f"file://{tmp_path}/log"
    log = sl.open(url, create=True, retention="bytes:1")
    attach(log)
    for number in range(30):
        with log.producer(linger=0) as producer:
            producer.append(key=b"k", value=b"v%d" % number)
    with tiering(log, target=1, grace=0.0) as tierer:
        tierer.run_once(everything=True)
    log.trim(grace=0.0)
    with sl.open(url) as tiered:
        assert tiered.hot.bounds().first > 0
        assert sl.bulk.verify(tiered).is_clean
    return url


def events_of(url: str) -> Path:
    """The folder of the one partition that has events."""
    folder = Path(url.removeprefix("file://")) / "cold" / "events"
    (batches,) = folder.glob("partition-*/batches")
    return batches.parent


@pytest.mark.matrix
@pytest.mark.parametrize("name", some(["batch", "lost batch", "head", "log.json", "topic.json"], 2))
def test_a_damaged_object_of_the_events_is_a_finding_that_names_it(url: str, name: str) -> None:
    folder = events_of(url)
    path = {
        "head": folder / "head",
        "log.json": folder / "log.json",
        "topic.json": folder.parent / "topic.json",
    }.get(name) or sorted(folder.glob("batches/*/*.batch"))[1]
    if name == "lost batch":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    with sl.open(url) as log:
        audit = sl.bulk.verify(log)
        hot = log.hot.bounds()
    (damage,) = audit.damage
    assert str(path.relative_to(folder.parent)) in damage.message
    assert audit.bounds == hot
    assert audit.examined["records"] == hot.next - hot.first
    notes = [finding.message for finding in audit.findings if finding.severity is Severity.NOTE]
    assert any("were not verified" in note for note in notes)


@pytest.mark.matrix
def test_the_command_names_a_damaged_object_of_the_events(url: str) -> None:
    path = min(events_of(url).glob("batches/*/*.batch"))
    path.write_bytes(path.read_bytes()[:-1])
    done = CliRunner().invoke(app, ["verify", url])
    assert done.exit_code == 1
    assert path.name in done.output.replace("\n", "")
    assert "DAMAGED" in done.output


@pytest.mark.matrix
@pytest.mark.parametrize("change", ["flip", "remove"])
def test_the_command_finds_events_that_cannot_be_opened(url: str, change: str) -> None:
    path = events_of(url).parent / "topic.json"
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"version", b"wersion"))
    done = CliRunner().invoke(app, ["verify", url])
    assert done.exit_code == 1
    assert "DAMAGED" in done.output
    assert "were not verified" in done.output.replace("\n", " ")


@pytest.mark.matrix
def test_events_that_are_gone_are_a_finding(url: str) -> None:
    shutil.rmtree(events_of(url).parent)
    with sl.open(url) as log:
        audit = sl.bulk.verify(log)
    (damage,) = audit.damage
    assert "no topic" in damage.message


@pytest.mark.matrix
def test_a_log_json_that_was_changed_since_the_log_was_opened_is_found(url: str) -> None:
    path = Path(url.removeprefix("file://")) / "log.json"
    data = path.read_bytes()
    with sl.open(url) as log:
        path.write_bytes(data.replace(b"bytes:1", b"bytes:9"))
        (damage,) = sl.bulk.verify(log).damage
        assert (damage.kind, damage.where) == (FindingKind.IDENTITY, "log.json")
        path.unlink()
        (damage,) = sl.bulk.verify(log).damage
        assert "is missing" in damage.message
        path.write_bytes(data)
        log.hot.plan(log.hot.start(), Limit())
        assert sl.bulk.verify(log).is_clean
    path.write_bytes(data.replace(b"bytes:1", b"bytes:9"))
    done = CliRunner().invoke(app, ["verify", url])
    assert (done.exit_code, "log.json" in done.output) == (1, True)
