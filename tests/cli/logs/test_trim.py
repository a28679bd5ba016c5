"""``strandline trim`` from the shell."""

from __future__ import annotations

import json
import os
from pathlib import Path
from uuid import UUID

import pytest

import strandline as sl
from strandline.cli.logs.trim import lines
from strandline.log.object.log import open_log
from strandline.log.object.maintain.trimmer import TrimResult
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.model.retention import SlotLimits
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.cli.conftest import Run, Start
from tests.cli.logs.test_lag import fill_queue
from tests.cli.logs.test_slots import fill


def objects(url: str) -> dict[str, bytes]:
    files = sorted(path for path in Path(url).rglob("*") if path.is_file() and not path.name.startswith(".~"))
    return {str(path): path.read_bytes() for path in files}


def test_batches_that_every_slot_has_passed_are_trimmed_and_deleted_a_grace_period_later(run: Run, log: str) -> None:
    opened = fill(log)
    opened.slots.create("billing", 6)
    done = run("trim", log)
    assert done.exit_code == 0, done.output
    assert "trimmed  6 records" in done.stdout
    assert "up to offset 6; a run in 10 min deletes their objects" in done.stdout
    assert "waiting  1 trim" in done.stdout
    assert opened.bounds().first == 6
    fields = json.loads(run("trim", log, "--grace", "0s", "--json").stdout)
    assert fields["deleted_objects"] == 7  # six batches, and the list of them
    assert fields["trims_waiting"] == 0
    assert run("trim", log).stdout.splitlines()[1] == "  nothing  to trim, and nothing to delete"


def test_a_dry_run_changes_nothing_and_reports_what_would_be_done(run: Run, log: str) -> None:
    opened = fill(log, limits=SlotLimits(lag_bytes=8000))
    opened.slots.create("billing", 6)
    opened.slots.create("stalled", 0)
    opened.store.put(f"batches/{0:016d}/{'f' * 32}.batch", b"an upload that was never listed")
    opened.trim(dry_run=True)
    before = objects(log)
    done = run("trim", log, "--dry-run", "--everything")
    assert objects(log) == before
    assert "would invalidate  1 slot" in done.stdout
    assert "would trim  6 records" in done.stdout
    assert "Slot 'stalled' would be invalidated (horizon) at offset 0" in done.stderr


def test_an_invalidated_slot_is_shouted_about_once_with_what_to_do(start: Start, log: str) -> None:
    opened = fill(log, limits=SlotLimits(lag_bytes=1))
    opened.slots.create("stalled", 0)
    process = start("trim", log, "--json")
    out, err = process.communicate(timeout=600)
    assert json.loads(out)["invalidated"] == [{"slot": "stalled", "position": 0, "reason": "horizon"}]
    (shouted,) = err.splitlines()
    assert shouted.startswith("warning: Slot 'stalled' was invalidated (horizon) at offset 0")
    assert f"'strandline slots reset {log} stalled --at OFFSET'" in shouted


def test_an_upload_that_was_never_listed_is_deleted_and_counted_as_an_orphan(run: Run, log: str) -> None:
    opened = fill(log)
    opened.store.put(f"batches/{0:016d}/{'f' * 32}.batch", b"x" * 50)
    first, second = (json.loads(run("trim", log, "--json").stdout) for _ in range(2))
    assert (first["orphans"], second["orphans"], second["orphan_bytes"]) == (0, 1, 50)


def test_every_line_is_a_sentence() -> None:
    done = TrimResult(
        floor=7,
        trimmed_records=1,
        trimmed_bytes=10,
        expired=["hold-a"],
        deleted=3,
        deleted_bytes=50,
        orphans=2,
        orphan_bytes=20,
        waiting=2,
    )
    assert lines(done, 60) == [
        ("expired", "1 hold of readers"),
        ("trimmed", "1 record (10 B), up to offset 7; a run in 1 min deletes their objects"),
        ("deleted", "3 objects (50 B), of which 2 (20 B) were never listed"),
        ("waiting", "2 trims, whose objects are deleted after their grace period"),
    ]


def test_orphans_are_reported_once_if_nothing_else_was_deleted() -> None:
    done = TrimResult(deleted=2, deleted_bytes=9, orphans=2, orphan_bytes=9, dry_run=True)
    assert lines(done, 60) == [("would delete", "2 objects (9 B) that were never listed")]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--dry-run"], "--every and --dry-run exclude"), (["--format", "queue-v1"], "--every is not for a queue-v1")],
)
def test_a_repeated_trim_says_what_it_goes_without(run: Run, log: str, options: list[str], sentence: str) -> None:
    done = run("trim", log, "--every", "10s", *options)
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_a_grace_period_that_is_no_time_is_wrong_usage(run: Run, log: str) -> None:
    fill(log, 1)
    assert run("trim", log, "--grace", "soon").exit_code == 2


# --- shared queues ---------------------------------------------------------------------------------------------


@pytest.fixture
def queue(log: str) -> sl.compat.QueueLog:
    """A queue of three batches, of which two are acknowledged, long ago."""
    queue = fill_queue(log, 3)
    with sl.Consumer(log, format="queue-v1") as consumer:
        for _ in range(2):
            batch = consumer.next_batch()
            assert batch is not None
            consumer.ack(batch.sequence)
    return queue


def test_unlisted_objects_of_a_shared_queue_are_deleted_when_they_are_old(
    run: Run, log: str, queue: sl.compat.QueueLog
) -> None:
    young = json.loads(run("trim", log, "--format", "queue-v1", "--json").stdout)
    assert (young["deleted_objects"], young["objects_waiting"]) == (0, 2)
    before = objects(log)
    dry = run("trim", log, "--format", "queue-v1", "--grace", "1s", "--dry-run")
    assert dry.exit_code == 0
    assert objects(log) == before
    for path in before:
        os.utime(path, (0, 0))  # the names say that they are young
    again = json.loads(run("trim", log, "--format", "queue-v1", "--json").stdout)
    assert again["deleted_objects"] == 0
    assert queue.bounds().next == 3


def test_a_grace_period_shorter_than_the_writers_has_to_be_confirmed(
    run: Run, log: str, queue: sl.compat.QueueLog
) -> None:
    before = objects(log)
    done = run("trim", log, "--format", "queue-v1", "--grace", "1s")
    assert done.exit_code == 1
    assert "repeat it with --yes" in done.stderr
    assert objects(log) == before
    assert run("trim", log, "--format", "queue-v1", "--grace", "1s", "--yes").exit_code == 0
    assert run("trim", log, "--format", "queue-v1", "--everything").exit_code == 2


def test_trim_says_which_clock_is_wrong_and_by_how_much(run: Run, log: str) -> None:
    opened = fill(log)
    ahead = ManualClock(now=opened.env.clock.now() + 365 * 86400 * 1_000_000)
    open_log(opened.store, env=Env(clock=ahead)).append(
        record_batch(timestamps=[0], ops=[0], keys=[None], values=[b"x"]), writer=WriterId(UUID(int=7)), number=0
    ).result(120)
    done = run("trim", log)
    assert done.exit_code == 0, done.output
    assert "listed up to 365 days ahead of the present, by a producer whose clock was ahead" in done.stderr
    assert json.loads(run("trim", log, "--json").stdout)["listed_ahead_seconds"] == pytest.approx(365 * 86400, abs=600)
