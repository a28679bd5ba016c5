"""Copying a shared queue into a log from the shell; what may go wrong meanwhile is tried in tests/log."""

from __future__ import annotations

import json
import signal

import pytest

import strandline as sl
from strandline.cli.bulk.upgrade import sentence
from strandline.compat.v1.upgrade import UpgradeProgress
from strandline.model.retention import Consumed
from tests.cli.conftest import Run, Start
from tests.cli.logs.test_lag import fill_queue


def values(url: str) -> list[bytes]:
    return [value for batch in sl.open(url).read() for value in batch["value"].to_pylist()]


def test_a_queue_is_copied_once_and_left_as_it_is(run: Run, log: str) -> None:
    queue = fill_queue(log, 5)
    target = log + "-new"
    done = run("upgrade", log, target, "--retention", "consumed")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("5 batches with 5 records copied: everything before batch 5 is in the log")
    assert "the queue is as it was" in done.stdout
    assert values(target) == [b"0", b"1", b"2", b"3", b"4"]
    assert sl.open(target).identity.retention == Consumed()
    assert (queue.bounds().count, queue.manifest().epoch) == (5, 0)
    fill_queue(log, 2)
    again = json.loads(run("upgrade", log, target, "--json").stdout)
    assert (again["batches"], again["records"], again["next_sequence"], again["next"]) == (2, 2, 7, 7)
    assert run("upgrade", log, target).stdout.startswith("There was nothing to copy")


def test_acknowledging_has_to_be_confirmed_and_empties_the_queue(run: Run, log: str) -> None:
    queue = fill_queue(log, 3)
    target = log + "-new"
    refused = run("upgrade", log, target, "--acknowledge")
    assert refused.exit_code == 1
    assert "repeat it with --yes" in refused.stderr
    assert queue.bounds().count == 3
    done = run("upgrade", log, target, "--acknowledge", "--yes")
    assert done.exit_code == 0, done.output
    assert "the queue is acknowledged" in done.stdout
    assert (queue.bounds().count, queue.manifest().epoch) == (0, 1)
    assert len(values(target)) == 3


@pytest.mark.matrix
def test_a_copy_that_is_killed_goes_on_where_it_was(start: Start, run: Run, log: str) -> None:
    fill_queue(log, 200)
    target = sl.open(log + "-new", create=True)
    process = start("upgrade", log, target.url)
    assert target.wait(target.start().at(5), timeout=120)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    before = target.bounds().next
    done = json.loads(run("upgrade", log, target.url, "--json").stdout)
    assert done["batches"] == 200 - before
    assert values(target.url) == [b"%d" % number for number in range(200)]


def test_a_place_without_a_queue_is_one_sentence_and_makes_no_log(run: Run, log: str) -> None:
    done = run("upgrade", log, log + "-new")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "There is no queue manifest at" in done.stderr
    assert run("tail", log + "-new").exit_code == 1


def test_missed_and_empty_batches_are_reported() -> None:
    done = UpgradeProgress(next=9, end=9, copied=1, records=4, missed=2, empty=3)
    told = "1 batch with 4 records copied, 3 empty ones passed over: everything before batch 9 is in the log"
    assert sentence(done, 4, acknowledged=False).startswith(told)
