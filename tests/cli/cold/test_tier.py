"""The cold tier from the shell: attaching, running, serving, and looking at segments."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import strandline as sl
from strandline.cli.cold.segments import Stretch, picture, stretches
from strandline.cli.cold.tier import FENCED
from strandline.cli.shared.any_log import LogPlace
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.log.findings import FindingKind, Severity
from strandline.log.object.log import open_log
from strandline.log.wal.recover.rewind import rewind
from strandline.model.cursor import Bounds
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.model.segments import ColdTier, SegmentId, SegmentMetadata, SegmentState, SegmentUpdate, TopicPartition
from strandline.serve.tier_state import newest
from strandline.tier.copy.planning import KnownSegments
from strandline.tier.copy.segment_files import segment_path
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import attach, cold_cell, cold_tier, follow_events, partition_of
from strandline.tier.verify import TierView, check_known, defect
from tests.cli.conftest import Run, Start

PARTITION = TopicPartition("", UUID(int=1), 0)


def fill(url: str, batches: int = 6, seed: int = 0) -> sl.log.ObjectLog:
    """A log with batches of 20 records, about 4 kB each."""
    log = open_log(url, create=True, retention=None if Path(url).exists() else "consumed")
    dice = random.Random(seed)
    with log.producer() as producer:
        for number in range(batches):
            for _ in range(20):
                producer.append(key=b"k%d" % number, value=dice.randbytes(200))
            producer.flush()
    return log


@pytest.fixture
def cold(run: Run, log: str) -> sl.log.ObjectLog:
    """A log of 120 records with a cold tier, all of them in segments of about 40."""
    fill(log)
    assert run("tier", "attach", log, "--partitions", 2).exit_code == 0
    done = run("tier", "run", log, "--target", "8KiB", "--all")
    assert done.exit_code == 0, done.output
    return open_log(log)


def fields(run: Run, *arguments: object, status: int = 0) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def objects(log: sl.log.ObjectLog) -> list[Path]:
    return sorted((Path(log.url.removeprefix("file://")) / "cold" / str(log.log_id)).rglob("*.parquet"))


@contextmanager
def events_of(log: sl.log.ObjectLog) -> Iterator[tuple[MetadataManager, TopicPartition]]:
    where = cold_tier(log)
    with follow_events(where) as manager:
        yield manager, partition_of(where)


def one_sentence(done: Any, status: int, *said: str) -> None:
    assert (done.exit_code, done.stdout) == (status, ""), done.output
    (line,) = done.stderr.splitlines()
    sentence = json.loads(line)["message"] if line.startswith("{") else line
    assert line.startswith(("error: ", "{"))
    for words in said:
        assert words in sentence


# --- attaching ---------------------------------------------------------------------------------------------------


def test_attaching_says_where_the_cold_tier_is_and_repeating_changes_nothing(run: Run, log: str) -> None:
    fill(log, 1)
    done = run("tier", "attach", log)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"file://{log} has its cold tier.",
        f"  segments  file://{log}/cold",
        f"  events    file://{log}/cold/events  8 partitions",
    ]
    assert "had its cold tier already" in run("tier", "attach", log).stdout
    again = fields(run, "tier", "attach", log)
    assert (again["attached"], again["partitions"], again["start"]) == (False, 8, 0)
    assert again["store"] == f"file://{log}/cold"


def test_a_log_has_one_cold_tier_and_another_one_is_refused(run: Run, log: str, tmp_path: Path) -> None:
    fill(log, 1)
    assert run("tier", "attach", log, "--store", f"file://{tmp_path}/here").exit_code == 0
    one_sentence(
        run("tier", "attach", log, "--store", f"file://{tmp_path}/there"),
        1, "has a cold tier already", f"file://{tmp_path}/here",
    )  # fmt: skip
    one_sentence(run("tier", "attach", log, "--store", "there"), 1, "Write whole addresses")


@pytest.mark.parametrize(
    "command",
    [("tier", "run"), ("tier", "status"), ("segments", "list"), ("segments", "map")],
)
def test_a_log_without_a_cold_tier_and_no_log_at_all_are_one_sentence(
    run: Run, log: str, command: tuple[str, str]
) -> None:
    one_sentence(run(*command, log), 1, "There is no log at")
    fill(log, 1)
    one_sentence(run(*command, log), 1, "has no cold tier", "strandline tier attach")


# --- running once ------------------------------------------------------------------------------------------------


def test_a_run_copies_what_fills_segments_and_all_of_it_if_asked(run: Run, log: str) -> None:
    fill(log, 5)
    run("tier", "attach", log)
    done = run("tier", "run", log, "--target", "8KiB")
    assert done.exit_code == 0, done.output
    *copied, last = done.stdout.splitlines()
    assert [line.split("  ")[0].strip() for line in copied] == ["copied", "copied"]
    assert copied[0].startswith(" copied  offsets 0 to 39  ")
    assert copied[0].endswith("/s")
    assert last.startswith("2 segments (80 records, ")
    assert "; 20 records (" in last
    assert last.endswith("in no segment yet")
    rest = fields(run, "tier", "run", log, "--all")
    assert [(segment["start"], segment["end"]) for segment in rest["copied"]] == [(80, 99)]
    assert (rest["records_left"], rest["bytes_left"], rest["stopped"]) == (0, 0, False)
    assert (rest["removed"], rest["expired"], rest["swept"]) == ([], [], [])
    assert run("tier", "run", log, "--all").stdout.startswith("nothing copied in ")


def test_the_cold_tier_deletes_segments_that_its_retention_releases_and_no_slot_needs(
    run: Run, cold: sl.log.ObjectLog
) -> None:
    cold.slots.create("slow", 50)
    cold.trim(grace=0)
    assert cold.bounds().first == 120
    done = run("tier", "run", cold.url, "--retention", "bytes:1")
    assert done.exit_code == 0, done.output
    assert "expired  offsets 0 to 39" in done.stdout
    assert "1 segment (40 records, " in done.stdout
    assert [row["start"] for row in fields(run, "segments", "list", cold.url)["segments"]] == [40, 80]
    assert fields(run, "tier", "status", cold.url)["announced"] >= 40
    assert "announced" in run("tier", "status", cold.url).stdout
    assert run("verify", cold.url).exit_code == 0


def test_wrong_options_are_wrong_usage(run: Run, cold: sl.log.ObjectLog) -> None:
    assert run("tier", "run", cold.url, "--target", "big").exit_code == 2
    assert run("tier", "run", cold.url, "--retention", "sometimes").exit_code == 2
    assert run("tier", "serve", cold.url, "--interval", "often").exit_code == 2
    assert run("tier", "attach", cold.url, "--partitions", 0).exit_code == 2
    one_sentence(
        run("tier", "run", cold.url, "--target", "2GiB"), 1, "error: target is a whole number from 1 up to 1073741824"
    )


def test_snapshots_of_the_events_are_kept_in_the_given_folder(run: Run, cold: sl.log.ObjectLog, tmp_path: Path) -> None:
    assert run("tier", "run", cold.url, "--snapshots", tmp_path / "mine").exit_code == 0
    assert any((tmp_path / "mine").iterdir())


@pytest.mark.matrix
def test_ctrl_c_ends_a_run_between_segments_with_nothing_half_way(run: Run, start: Start, log: str) -> None:
    opened = fill(log, 150)
    run("tier", "attach", log)
    process = start("tier", "run", log, "--target", "1KiB")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(" copied  offsets 0 to ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "")
    assert out.splitlines()[-1].startswith("stopped: ")
    rows = fields(run, "segments", "list", log)["segments"]
    assert {row["state"] for row in rows} == {"copy-finished"}
    assert 0 < len(rows) < 150
    assert len(objects(opened)) == len(rows)
    assert run("verify", log).stdout.endswith("no damage, no waste, no notes\n")


# --- serving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.matrix
def test_serving_copies_prints_a_line_and_ends_cleanly_on_a_signal(
    run: Run, start: Start, log: str, number: signal.Signals
) -> None:
    fill(log)
    run("tier", "attach", log)
    process = start("tier", "serve", log, "--interval", "1s", "--target", "8KiB")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == f"file://{log} is tiered to file://{log}/cold, every 1.0 s.\n"
    while "Round: 3 copied" not in (said := process.stderr.readline()):
        assert said, "it ended"
        assert " INFO    copied  offsets " in said
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, "")
    stopping = ["SIGTERM: stopping."] if number == signal.SIGTERM else []
    told = [line.split("    ", 1)[1] for line in err.splitlines()]
    assert told == [*stopping, "Stopped: no copy is left unfinished."]
    assert len(fields(run, "segments", "list", log, "--state", "copy-finished")["segments"]) == 3


@pytest.mark.matrix
def test_a_service_that_another_tierer_fences_says_so_and_ends_with_a_status_of_its_own(
    run: Run, start: Start, log: str
) -> None:
    opened = fill(log)
    run("tier", "attach", log)
    process = start("tier", "serve", log, "--interval", "1s", "--target", "8KiB", "--quiet", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["interval"] == 1
    # The slot is its own from then on.
    while all(state.name != TIER_SLOT or state.holder is None for state in opened.slots.list()):
        assert process.poll() is None
    assert run("tier", "run", log, "--all").exit_code == 0
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (FENCED, "")
    (said,) = err.splitlines()
    assert json.loads(said)["message"].startswith(f"Slot {TIER_SLOT!r} is held by ")
    assert run("verify", log).exit_code == 0


# --- status ------------------------------------------------------------------------------------------------------


def test_status_shows_both_tiers_and_the_tierers_lag(run: Run, cold: sl.log.ObjectLog) -> None:
    fill(cold.url.removeprefix("file://"), 2, seed=1)
    cold.trim(grace=0)
    seen = fields(run, "tier", "status", cold.url)
    assert seen["hot"] == {"first": 120, "next": 160}
    assert (seen["cold"]["first"], seen["cold"]["next"], seen["cold"]["segments"]) == (0, 120, 3)
    assert seen["cold"]["states"] == {"copy_finished": 3}
    assert (seen["records_left"], seen["slot"]["position"], seen["slot"]["epoch"]) == (40, 120, 1)
    assert seen["bytes_left"] == sum(span.size for span in cold.plan(cold.start()))
    assert (seen["events"]["ready"], seen["events"]["applied"], seen["announced"]) == (True, 6, 0)
    text = run("tier", "status", cold.url).stdout
    assert "cold       offsets 0 to 119, 120 records, in 3 segments (" in text
    assert "hot        offsets 120 to 159, 40 records" in text
    assert "left       40 records (" in text
    assert "is ready, with 6 events" in text


def test_status_before_the_first_run_and_of_a_copy_that_was_left_over(run: Run, log: str) -> None:
    opened = fill(log)
    attach(opened)
    assert "none has run yet" in run("tier", "status", log).stdout
    begin_copy(opened, 0, 9)
    text = run("tier", "status", log).stdout
    assert "cold       nothing yet" in text
    assert "1 copy under way, or left over" in text
    assert fields(run, "tier", "status", log)["cold"]["states"] == {"copy_started": 1}


def test_status_says_why_the_events_are_not_known_and_ends_with_status_1(run: Run, cold: sl.log.ObjectLog) -> None:
    events = Path(cold.url.removeprefix("file://")) / "cold" / "events"
    events.rename(events.with_name("elsewhere"))
    done = run("tier", "status", cold.url)
    assert done.exit_code == 1
    assert "not known" in done.stdout
    assert "hot        offsets 0 to 119" in done.stdout
    seen = fields(run, "tier", "status", cold.url, status=1)
    assert (seen["cold"], seen["events"]["ready"], seen["hot"]["next"]) == (None, False, 120)
    assert seen["events"]["why"]


def begin_copy(log: sl.log.ObjectLog, first: int, last: int, number: int = 7) -> SegmentMetadata:
    """What a tierer that died leaves behind."""
    with events_of(log) as (manager, partition):
        segment = SegmentMetadata(
            segment=SegmentId(partition, UUID(int=number)), start=first, end=last, broker=0, max_timestamp=-1,
            event_timestamp=0, terms=((0, first),), size=10,
        )  # fmt: skip
        manager.add(segment)
    return segment


# --- listing -----------------------------------------------------------------------------------------------------


def test_segments_are_listed_by_their_offsets_and_chosen_by_term_and_state(run: Run, cold: sl.log.ObjectLog) -> None:
    begin_copy(cold, 120, 129)
    rows = fields(run, "segments", "list", cold.url)["segments"]
    assert [(row["start"], row["end"], row["records"], row["state"]) for row in rows] == [
        (0, 39, 40, "copy-finished"),
        (40, 79, 40, "copy-finished"),
        (80, 119, 40, "copy-finished"),
        (120, 129, 10, "copy-started"),
    ]
    assert [row["size"] for row in rows[:3]] == [path.stat().st_size for path in objects(cold)]
    assert [row["id"] in path.name for row, path in zip(rows, objects(cold), strict=False)] == [True] * 3
    assert rows[0]["terms"] == [[0, 0]]
    assert rows[0]["max_timestamp"].endswith("Z")
    assert (rows[3]["max_timestamp"], rows[3]["superseded"]) == (None, False)
    (started,) = fields(run, "segments", "list", cold.url, "--state", "copy-started")["segments"]
    assert started["start"] == 120
    assert len(fields(run, "segments", "list", cold.url, "--term", 0)["segments"]) == 4
    assert fields(run, "segments", "list", cold.url, "--term", 1)["segments"] == []
    text = run("segments", "list", cold.url).stdout
    assert text.splitlines()[0].startswith(f"{cold.url}/cold  4 segments, 130 records, ")
    assert rows[0]["id"] in text
    assert run("segments", "list", cold.url, "--state", "gone").exit_code == 2


def test_a_time_outside_the_calendar_is_printed_as_a_number() -> None:
    assert newest(1 << 60) == f"{1 << 60} ms"


# --- the map -----------------------------------------------------------------------------------------------------


def test_the_map_shows_which_offsets_are_in_which_tier(
    run: Run, cold: sl.log.ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    fill(cold.url.removeprefix("file://"), 2, seed=1)
    done = run("segments", "map", cold.url)
    assert done.stdout.splitlines() == [
        f"{cold.url}  offsets 0 to 160",
        "        0                                    160",
        "cold    ██████████▓▓▓▓▓▓▓▓▓▓██████████",
        "hot     ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒",
        "both      0 to 119  120 records in 3 segments",
        "hot     120 to 159  40 records",
    ]
    cold.trim(grace=0)
    begin_copy(cold, 120, 139)
    assert run("segments", "map", cold.url).stdout.splitlines()[2:] == [
        "cold    ██████████▓▓▓▓▓▓▓▓▓▓██████████",
        "hot                                   ▒▒▒▒▒▒▒▒▒▒",
        "copying                               +++++",
        "cold      0 to 119  120 records in 3 segments",
        "hot     120 to 159  40 records",
    ]
    seen = fields(run, "segments", "map", cold.url)
    assert [(each["first"], each["next"], each["where"]) for each in seen["stretches"]] == [
        (0, 120, "cold"),
        (120, 160, "hot"),
    ]
    assert (seen["segments"], seen["first"], seen["next"]) == (3, 0, 160)


def test_the_map_of_an_empty_log_says_so(run: Run, log: str) -> None:
    attach(open_log(log, create=True))
    assert run("segments", "map", log).stdout.splitlines()[1:] == ["no records, in neither tier"]
    assert fields(run, "segments", "map", log)["stretches"] == []


def held(first: int, last: int, state: SegmentState = SegmentState.COPY_FINISHED) -> SegmentMetadata:
    return SegmentMetadata(
        segment=SegmentId(PARTITION, UUID(int=first + 1)), start=first, end=last, broker=0, max_timestamp=-1,
        event_timestamp=0, terms=((0, first),), size=1, state=state,
    )  # fmt: skip


def test_stretches_are_cut_where_the_tiers_change_and_holes_are_among_them() -> None:
    segments = [held(0, 9), held(10, 19), held(30, 49)]
    assert stretches(segments, Bounds(60, 100)) == [
        Stretch(0, 20, cold=True, hot=False, segments=2),
        Stretch(20, 30, cold=False, hot=False, segments=0),
        Stretch(30, 50, cold=True, hot=False, segments=1),
        Stretch(50, 60, cold=False, hot=False, segments=0),
        Stretch(60, 100, cold=False, hot=True, segments=0),
    ]
    assert stretches([held(0, 59), held(50, 79)], Bounds(40, 60)) == [
        Stretch(0, 40, cold=True, hot=False, segments=1),
        Stretch(40, 60, cold=True, hot=True, segments=2),
        Stretch(60, 80, cold=True, hot=False, segments=1),
    ]
    assert stretches([], Bounds(5, 5)) == []


def test_a_hole_is_seen_however_small_it_is() -> None:
    segments = [held(0, 499_999), held(500_001, 999_999)]
    hot = Bounds(1_000_000, 1_000_000)
    rows = {label: row for label, row, _ in picture(segments, stretches(segments, hot), hot, 20)}
    assert rows["holes"] == " " * 10 + "!"
    assert rows["cold"] == "█" * 10 + "░" + "▓" * 9


def test_few_offsets_are_drawn_wide() -> None:
    segments, hot = [held(0, 0)], Bounds(1, 2)
    rows = {label: row for label, row, _ in picture(segments, stretches(segments, hot), hot, 10)}
    assert (rows["cold"], rows["hot"]) == ("█████", "     ▒▒▒▒▒")


# --- verifying ---------------------------------------------------------------------------------------------------


def test_a_sound_cold_tier_is_clean(run: Run, cold: sl.log.ObjectLog) -> None:
    done = run("verify", cold.url)
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last.startswith("clean: 120 records read (")
    assert ", 120 of them in both tiers, " in last
    assert ", 3 segments, " in last
    seen = fields(run, "verify", cold.url, "--quick")
    assert (seen["clean"], seen["quick"], seen["findings"], seen["examined"]["segments"]) == (True, True, [], 3)


def test_a_flipped_byte_is_found_and_named(run: Run, cold: sl.log.ObjectLog) -> None:
    path = objects(cold)[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    done = run("verify", cold.url)
    assert done.exit_code == 1
    assert path.name in done.stdout
    assert "is damaged: the checksum of" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("DAMAGED: 120 records read")
    assert run("verify", cold.url, "--quick").exit_code == 0  # its size and its end are right
    data[-20] ^= 1
    path.write_bytes(data)
    (found,) = fields(run, "verify", cold.url, "--quick", status=1)["findings"]
    assert (found["severity"], found["kind"]) == ("damage", "segment")
    assert found["where"].endswith(path.name)


def test_a_missing_a_longer_and_another_segments_object_are_found(run: Run, cold: sl.log.ObjectLog) -> None:
    first, second, third = objects(cold)
    data = second.read_bytes()
    third.write_bytes(third.read_bytes() + b"x")
    second.write_bytes(first.read_bytes())
    first.unlink()
    for options in ((), ("--quick",)):
        found = fields(run, "verify", cold.url, *options, status=1)["findings"]
        assert [finding["severity"] for finding in found] == ["damage"] * 3
        assert "is missing (offsets 0 to 39)" in found[0]["message"]
        assert second.name in found[1]["message"]
        assert f"but {third.stat().st_size - 1} by its events" in found[2]["message"]
    second.write_bytes(data)
    assert fields(run, "verify", cold.url, status=1)["damage"] == 2


def test_an_object_that_no_event_knows_is_waste_and_no_damage(run: Run, cold: sl.log.ObjectLog) -> None:
    path = objects(cold)[0]
    orphan = path.with_name(f"{0:020d}-{UUID(int=5)}.parquet")
    orphan.write_bytes(path.read_bytes())
    done = run("verify", cold.url)
    assert done.exit_code == 0
    assert "waste  " in done.stdout
    assert orphan.name in done.stdout
    assert done.stdout.endswith("no damage, 1 to waste, no notes\n")


def test_a_copy_that_was_left_over_is_a_note_and_its_object_no_orphan(run: Run, cold: sl.log.ObjectLog) -> None:
    segment = begin_copy(cold, 120, 129)
    beside = objects(cold)[0].with_name(segment_path(segment.segment, 120).rpartition("/")[2])
    beside.write_bytes(b"half")
    (found,) = fields(run, "verify", cold.url)["findings"]
    assert (found["severity"], found["kind"]) == ("note", "state")


def remove(log: sl.log.ObjectLog, which: int) -> None:
    """Let the events tell that a segment is gone."""
    with events_of(log) as (manager, partition):
        segment = manager.current(partition, lambda cache: list(cache.segments(partition)))[which]
        for state in (SegmentState.DELETE_STARTED, SegmentState.DELETE_FINISHED):
            manager.update(SegmentUpdate(segment=segment.segment, broker=0, event_timestamp=0, state=state))


@pytest.mark.matrix
def test_a_segment_that_expires_while_it_is_verified_is_no_damage(
    run: Run, cold: sl.log.ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expiring(store: Any, segment: SegmentMetadata, *_: object) -> str | None:
        if segment.start:
            return None
        remove(cold, 0)
        objects(cold)[0].unlink()
        return defect(store, segment, None)

    monkeypatch.setattr("strandline.tier.verify.defect", expiring)
    seen = fields(run, "verify", cold.url)
    assert (seen["clean"], seen["findings"]) == (True, [])


def test_findings_from_the_events_alone_are_reported() -> None:
    twice, last, gone = held(5, 14), held(15, 29), held(30, 39, SegmentState.DELETE_STARTED)
    seen = TierView(
        url="u",
        cold=ColdTier(PARTITION.topic_id, "memory://cold", "memory://events", 1),
        hot=Bounds(32, 50),
        known=KnownSegments((held(0, 9), held(2, 3), twice, last, gone), (held(2, 3), gone)),
        partition=0,
        events=9,
        slots=(SlotState(TIER_SLOT, 0, None, 1, 0), SlotState("ahead", 40, None, 1, 0)),
    )
    found = [(finding.severity, finding.kind, finding.where) for finding in check_known(seen)]
    assert found == [
        (Severity.NOTE, FindingKind.OVERLAP, segment_path(twice.segment, 5)),
        (Severity.DAMAGE, FindingKind.HOLE, "memory://cold"),
        (Severity.WASTE, FindingKind.STATE, segment_path(held(2, 3).segment, 2)),
        (Severity.NOTE, FindingKind.STATE, segment_path(gone.segment, 30)),
    ]


def test_a_hole_and_a_slot_whose_records_are_gone_are_damage(
    run: Run, cold: sl.log.ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    cold.trim(grace=0)
    with sl.tier.tiered(cold) as both:
        both.slots.create("slow", 45)
    fill(cold.url.removeprefix("file://"), 2, seed=1)
    remove(cold, 1)
    objects(cold)[1].unlink()
    found = fields(run, "verify", cold.url, status=1)["findings"]
    assert [(finding["severity"], finding["kind"]) for finding in found] == [("damage", "hole"), ("damage", "slot")]
    assert "offsets 40 to 79 are lost" in found[0]["message"]
    assert "'slow' needs offset 45" in found[1]["message"]
    text = run("segments", "map", cold.url).stdout
    assert "holes             !!!!!!!!!!" in text
    assert "HOLE     40 to  79  40 records in neither tier" in text


# --- write-ahead logs --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed write-ahead log of 200 records in four files."""
    folder = tmp_path / "wal"
    dice = random.Random(4)
    with WriteAheadLog.open(folder, roll_bytes=10_000, background=False) as wal:
        for _ in range(200):
            wal.append(dice.randbytes(150))
    return folder


def test_a_write_ahead_log_is_tiered_from_its_folder(run: Run, folder: Path) -> None:
    attached = fields(run, "tier", "attach", folder)
    assert attached["store"] == f"{folder.as_uri()}/cold"
    assert fields(run, "tier", "status", folder)["records_left"] == 200
    done = run("tier", "run", folder, "--target", "8KiB", "--all")
    assert done.exit_code == 0, done.output
    assert "(200 records, " in done.stdout
    status = fields(run, "tier", "status", folder.as_uri())
    assert (status["cold"]["first"], status["cold"]["next"], status["records_left"]) == (0, 200, 0)
    assert status["slot"]["position"] == 200
    assert run("verify", folder).exit_code == 0
    assert "both" in run("segments", "map", folder).stdout


@pytest.mark.matrix
def test_a_write_ahead_log_that_is_open_elsewhere_is_looked_at_and_not_tiered(run: Run, folder: Path) -> None:
    with WriteAheadLog.open(folder, background=False) as wal:
        assert run("tier", "attach", folder).exit_code == 0
        wal.append(b"one more")
        assert fields(run, "tier", "status", folder)["hot"] == {"first": 0, "next": 201}
        assert fields(run, "segments", "list", folder)["segments"] == []
        one_sentence(run("tier", "run", folder), FENCED, "is open for writing by process")
    assert run("tier", "run", folder, "--all").exit_code == 0


def test_a_folder_is_distinguished_from_an_address(folder: Path, log: str) -> None:
    fill(log, 1)
    assert LogPlace(str(folder)).folder == LogPlace(folder.as_uri()).folder == str(folder)
    assert LogPlace(log).folder is LogPlace(f"{log}-absent").folder is LogPlace("s3://bucket/log").folder is None
    (folder / "log.json").write_bytes(b"{")
    assert LogPlace(str(folder)).folder == str(folder)


def test_a_restored_log_is_refused_with_the_command_that_truncates_its_cold_tier(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    assert run("tier", "attach", folder, "--store", f"{tmp_path.as_uri()}/cold").exit_code == 0
    assert run("tier", "run", folder, "--all").exit_code == 0
    shutil.copytree(folder, tmp_path / "backup")
    for payload in (b"was lost", b"came instead"):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup", folder)
        with WriteAheadLog.open(folder, background=False) as wal:
            wal.append(payload)
        done = run("tier", "run", folder, "--all")
    one_sentence(done, 1, "another record at offset 200", "'strandline tier truncate --from 200'")
    one_sentence(run("tier", "truncate", folder, "--from", 200), 1, "repeat it with --yes", "Nothing was changed")
    one_sentence(run("tier", "truncate", folder, "--from", 300, "--yes"), 1, "the log itself has 0 up to 201")
    cut = fields(run, "tier", "truncate", folder, "--from", 200, "--yes")
    assert [(segment["start"], segment["end"]) for segment in cut["retired"]] == [(200, 200)]
    assert "(1 record, " in run("tier", "run", folder, "--all").stdout
    assert "nothing cut or removed" in run("tier", "truncate", folder, "--from", 201, "--yes").stdout


def test_a_log_that_was_rewound_says_what_became_of_the_segments_of_its_old_end(run: Run, folder: Path) -> None:
    assert run("tier", "attach", folder).exit_code == 0
    assert run("tier", "run", folder, "--all").exit_code == 0
    rewind(str(folder), 150, quarantine=str(folder.parent / "aside"))
    with WriteAheadLog.open(folder, background=False) as wal:
        wal.append(b"of a new term", term=7)
    done = fields(run, "tier", "run", folder, "--all")
    assert [(segment["start"], segment["end"]) for segment in done["retired"]] == [(0, 199)]
    assert [(segment["start"], segment["end"]) for segment in done["copied"]] == [(150, 150)]
    assert run("verify", folder).exit_code == 0


def test_the_log_of_a_node_is_refused_by_every_command_of_the_cold_tier(run: Run, tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "node") as primary:
        primary.append_values([b"order 1 is new"])
        folder = primary.node.primary.log.folder
    for command in (("attach",), ("run",), ("serve",), ("status",), ("truncate", "--from", 0, "--yes")):
        done = run("tier", command[0], folder, *command[1:])
        one_sentence(done, 1, "belongs to the node in", "run the node with --cold")
    for command in ("list", "map"):
        one_sentence(run("segments", command, folder), 1, "belongs to the node in")
    assert fields(run, "verify", folder)["examined"]["records"] == 1


# --- other commands, on a log whose older records are only in segments -------------------------------------------


def test_tail_shows_both_tiers_as_one_log(run: Run, cold: sl.log.ObjectLog) -> None:
    cold.trim(grace=0)
    fill(cold.url.removeprefix("file://"), 1, seed=1)
    assert cold.bounds() == Bounds(120, 140)

    def offsets(*options: object) -> list[int]:
        done = run("tail", cold.url, "--json", *options)
        assert done.exit_code == 0, done.output
        return [json.loads(line)["offset"] for line in done.stdout.splitlines()]

    assert offsets("--from", "beginning") == list(range(140))
    assert offsets("--from", 35, "--limit", 10) == list(range(35, 45))
    assert offsets("--from", 115, "--hold", "1m") == list(range(115, 140))
    assert offsets("--from", 35, "--limit", 10, "--hold", "1m", "--follow") == list(range(35, 45))
    assert offsets("--from", "2020-01-01T00:00:00Z", "--limit", 1) == [0]
    assert offsets() == list(range(130, 140))
    assert all(state.expires is None for state in cold.slots.list())


@pytest.mark.matrix
def test_the_last_records_are_shown_also_if_only_segments_have_them(run: Run, cold: sl.log.ObjectLog) -> None:
    cold.trim(grace=0)
    assert cold.bounds() == Bounds(120, 120)
    done = run("tail", cold.url, "--json")
    assert [json.loads(line)["offset"] for line in done.stdout.splitlines()] == list(range(110, 120))


@pytest.mark.matrix
def test_a_tail_of_the_hot_tier_does_not_need_the_cold_one(run: Run, cold: sl.log.ObjectLog) -> None:
    cold.trim(grace=0)
    fill(cold.url.removeprefix("file://"), 1, seed=1)
    events = Path(cold.url.removeprefix("file://")) / "cold" / "events"
    events.rename(events.with_name("elsewhere"))
    assert len(run("tail", cold.url, "--json").stdout.splitlines()) == 10
    one_sentence(run("tail", cold.url, "--from", "beginning"), 1)


@pytest.mark.matrix
def test_slots_are_put_where_only_segments_are_and_the_rest_goes_on(run: Run, cold: sl.log.ObjectLog) -> None:
    cold.trim(grace=0)
    assert fields(run, "slots", "create", cold.url, "old", "--at", 17)["position"] == 17
    assert fields(run, "slots", "reset", cold.url, "old", "--at", "beginning", "--yes")["position"] == 0
    rows = {row["slot"]: row for row in fields(run, "slots", cold.url)["slots"]}
    assert (rows["old"]["position"], rows["old"]["invalid"]) == (0, None)
    assert {row["slot"]: row["records_behind"] for row in fields(run, "lag", cold.url)["slots"]} == {
        "old": 120,
        TIER_SLOT: 0,
    }
    assert fields(run, "verify", cold.url)["clean"]
    assert run("trim", cold.url).exit_code == 0
    assert cold_cell(cold).read() is not None


# --- another history ---------------------------------------------------------------------------------------------


def regrown_wal(run: Run, folder: Path, *, term: int) -> None:
    """A write-ahead log cut back to 4 that grew again to 8, in this term; its cold tier has 10 records of term 1."""

    def append(word: bytes, count: int, term: int) -> None:
        with WriteAheadLog.open(str(folder)) as wal:
            for number in range(count):
                wal.append(b"%s %d" % (word, number), term=term)

    append(b"once", 10, 1)
    assert run("tier", "attach", folder).exit_code == 0
    assert run("tier", "run", folder, "--all").exit_code == 0
    rewind(str(folder), 4, quarantine=str(folder.parent / "aside"))
    append(b"again", 8, term)


def test_verifying_finds_segments_of_another_history_in_the_log_s_own_term(run: Run, tmp_path: Path) -> None:
    regrown_wal(run, tmp_path / "log", term=1)
    for options in ((), ("--quick",)):
        findings = fields(run, "verify", tmp_path / "log", *options, status=1)["findings"]
        (found,) = (one for one in findings if one["kind"] != "difference")  # of the records, if they are read
        assert (found["kind"], found["severity"]) == ("history", "damage")
        assert "ends with another record, at offset 9, than the log" in found["message"]


def test_verifying_notes_segments_that_the_next_round_cuts_because_the_log_went_on_in_a_later_term(
    run: Run, tmp_path: Path
) -> None:
    regrown_wal(run, tmp_path / "log", term=2)
    (found,) = fields(run, "verify", tmp_path / "log")["findings"]
    assert (found["kind"], found["severity"]) == ("history", "note")
    assert "at offset 4, where the log continued in a later term" in found["message"]


def test_verifying_finds_a_cold_tier_of_a_later_term_than_the_log(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with WriteAheadLog.open(str(folder)) as wal:
        wal.append(b"one", term=1)
    shutil.copytree(folder, tmp_path / "copy")
    with WriteAheadLog.open(str(folder)) as wal:
        wal.append(b"two", term=2)
        assert attach(wal, (tmp_path / "cold").as_uri())
    assert run("tier", "run", folder, "--all").exit_code == 0
    shutil.copytree(tmp_path / "copy", tmp_path / "back")
    shutil.copy(folder / "cold.json", tmp_path / "back")
    with WriteAheadLog.open(str(tmp_path / "back")) as wal:
        wal.append(b"other", term=1)
    (found,) = fields(run, "verify", tmp_path / "back", status=1)["findings"]
    assert (found["kind"], found["severity"]) == ("history", "damage")
    assert "its cold tier has term 2" in found["message"]


def test_verifying_finds_an_object_log_that_was_restored_and_grew_differently(
    run: Run, log: str, tmp_path: Path
) -> None:
    fill(log, 3)
    shutil.copytree(log, tmp_path / "copy")
    assert run("tier", "attach", log).exit_code == 0
    fill(log, 3)
    assert run("tier", "run", log, "--target", "8KiB", "--all").exit_code == 0
    assert run("verify", log).exit_code == 0
    shutil.rmtree(Path(log) / "slots")
    shutil.copytree(tmp_path / "copy", log, dirs_exist_ok=True)
    fill(log, 4, seed=9)
    found = fields(run, "verify", log, status=1)["findings"]
    assert {one["kind"] for one in found if one["severity"] == "damage"} == {"history", "difference"}


# --- compaction --------------------------------------------------------------------------------------------------


def test_segments_are_copied_by_several_workers_merged_and_purged(run: Run, log: str) -> None:
    assert run("produce", log, "--create", "--count", 400).exit_code == 0
    assert run("produce", log, "--format", "json", given='{"key": "key-000001", "op": "purge"}').exit_code == 0
    assert run("tier", "attach", log).exit_code == 0
    assert fields(run, "tier", "run", log, "--all", "--workers", 2)["records_left"] == 0
    found = fields(run, "tier", "compact", log, "--purge")
    assert (found["made"], found["erased"], found["held_back"]) == ([], 0, 1)
    done = run("tier", "compact", log, "--purge", "--workers", 1)
    assert "nothing to rewrite" in done.stdout
    assert "1 segment not searched: the log itself still has" in done.stdout.replace("\n", " ")


def test_workers_are_threads_and_spark_has_cores(run: Run, log: str, tmp_path: Path) -> None:
    assert run("produce", log, "--create", "--count", 10).exit_code == 0
    one_sentence(run("spark", "export", log, tmp_path / "out", "--workers", 2), 1, "--workers is for threads")
    wrong = ("spark", "--master", "local", "--remote", "sc://nowhere", "export", log, tmp_path / "out")
    one_sentence(run(*wrong), 1, "exclude each other")
    assert run("spark", "--conf", "nonsense", "export", log, tmp_path / "out").exit_code == 2
