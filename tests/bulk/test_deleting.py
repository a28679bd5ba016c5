"""Deletion of logs: killed at any moment, beside producers that still run, with slots, cold tiers and strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import Diverged, Fenced, InvalidInput, NotALog, StrandlineError, Unsupported
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head.edits import SPILL_AT
from strandline.log.wal.log import WalLog
from strandline.storage.env import Env
from strandline.testing.clock import SeededChance
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.simdisk import SimulatedDisk, crash_everywhere
from tests.contracts.logs import append, content, writer_named
from tests.log.wal.workload import FOLDER, open_on
from tests.matrix_cases import sampled


def opened(store: Any, seed: int = 1) -> ObjectLog:
    return open_log(store, create=True, env=Env(chance=SeededChance(seed)))


def filled(store: Any) -> ObjectLog:
    log = opened(store)
    for number in range(3):
        append(log, b"%d" % number, number=number)
    log.slots.create("billing", 1)
    log.slots.drop("billing")
    return log


# --- killed at any moment --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_deletion_that_is_killed_at_any_request_leaves_a_whole_log_or_one_that_says_so(*, after: bool) -> None:
    outcomes = set()
    line = FaultyStore(place := PlainStore())
    filled(place)
    sl.bulk.delete(line, env=Env(chance=SeededChance(7)))
    for request in range(len(line.log)):
        place = PlainStore()
        former = filled(place)
        cursor = former.end()
        line = FaultyStore(place)
        line.crash_at(request, after=after)
        try:
            sl.bulk.delete(line, env=Env(chance=SeededChance(7)))
            outcomes.add("deleted")  # a read that was answered
        except Crash:
            outcomes.add(whole_or_begun(place))
            if any(place.list("head")):
                sl.bulk.delete(place, env=Env(chance=SeededChance(8)))
        assert [item.path for item in place.list("")] == []
        with pytest.raises(StrandlineError):
            append(former, b"late", number=3)
        assert not [item.path for item in place.list("") if not item.path.startswith("batches/")]
        fresh = opened(place, 9)
        assert fresh.log_id != cursor.log_id
        with pytest.raises(Diverged):
            fresh.plan(cursor)
        with pytest.raises(StrandlineError, match=str(fresh.log_id)):
            append(former, b"late", number=3)
        assert content(fresh) == []
    assert {"whole", "begun"} <= outcomes


def whole_or_begun(place: PlainStore) -> str:
    """What an interrupted deletion has left: all of the log, or nothing that can be used."""
    if not any(place.list("head")):
        assert not list(place.list(""))
        return "gone"
    try:
        found = content(open_log(place))
    except NotALog:
        for create in (True, False):
            with pytest.raises(NotALog, match="strandline delete"):
                open_log(place, create=create).bounds()
        return "begun"
    assert [value for _, value in found] == [b"0", b"1", b"2"]
    return "whole"


def test_a_twin_that_deletes_without_saying_so_first_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from strandline.bulk import deleting

    monkeypatch.setattr(deleting._ObjectDeletion, "_begin", lambda self, head: None)  # noqa: ARG005
    with pytest.raises((AssertionError, StrandlineError)):
        test_a_deletion_that_is_killed_at_any_request_leaves_a_whole_log_or_one_that_says_so(after=False)


def delete_wal(disk: SimulatedDisk, notes: list[Any]) -> None:
    """Make a log, and delete it; a process that finds the deletion begun, or done, goes on."""
    env = Env(disk=disk)
    if not notes:
        log = open_on(disk)
        if not log.bounds().next:
            log.append_value(b"a").result()
        notes.append("made")
        log.close()
    try:
        sl.bulk.delete(f"wal://{FOLDER}", env=env)
    except NotALog:
        assert "made" in notes
    notes.append("deleted")


def check_wal(disk: SimulatedDisk, notes: list[Any]) -> None:
    names = {row.name for row in disk.scan(FOLDER)}
    if "deleted" in notes:
        assert names <= {"lock"}
        return
    try:
        log = WalLog.open(FOLDER, create=False, background=False, env=Env(disk=disk))
    except NotALog as error:
        begun = "deletion" in str(error)
        assert begun or "made" not in notes or names <= {"lock"}, f"{names} are left, and nothing says why"
        return
    if "made" in notes:
        assert [value for _, value in content(log)] == [b"a"]
    disk.kill()


@pytest.mark.parametrize("every", sampled(13))
def test_a_write_ahead_log_is_whole_or_says_that_its_deletion_has_begun(every: int) -> None:
    assert crash_everywhere(delete_wal, check_wal, every=every).states > 50 / every


# --- what is refused -------------------------------------------------------------------------------------------

SCHEMES = pytest.mark.parametrize("scheme", ["file", "wal"])


def made(tmp_path: Path, scheme: str, *slots: str) -> str:
    url = f"{scheme}://{tmp_path}/log"
    with sl.open(url, create=True) as log:
        log.append(pa.table({"value": [b"a"]}), writer=writer_named(1), number=0).result()
        for name in slots:
            log.slots.create(name, 0)
    return url


@SCHEMES
def test_valid_slots_keep_a_log_unless_by_force(tmp_path: Path, scheme: str) -> None:
    url = made(tmp_path, scheme, "billing", "reports")
    for dry_run in (True, False):
        with pytest.raises(InvalidInput, match=r"pinned by slots billing, reports; nothing was deleted"):
            sl.bulk.delete(url, dry_run=dry_run)
    with sl.open(url) as log:
        assert log.bounds().next == 1
    done = sl.bulk.delete(url, force=True)
    assert (done.deleted, done.slots) == (True, ("billing", "reports"))
    with pytest.raises(NotALog):
        sl.open(url)


@SCHEMES
def test_a_dry_run_says_what_would_go_and_changes_nothing(tmp_path: Path, scheme: str) -> None:
    url = made(tmp_path, scheme)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    told = sl.bulk.delete(url, dry_run=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"} == before
    assert not told.deleted
    done = sl.bulk.delete(url)
    assert (done.objects, done.log_id) == (told.objects, told.log_id)
    assert told.bytes > 0


def test_a_write_ahead_log_that_is_open_is_not_deleted(tmp_path: Path) -> None:
    url = made(tmp_path, "wal")
    with sl.open(url) as log:
        with pytest.raises(Fenced, match="open for writing"):
            sl.bulk.delete(url)
        assert log.append(pa.table({"value": [b"b"]}), writer=writer_named(1), number=1).result().first == 1
    assert sl.bulk.delete(url).deleted


def test_the_log_of_a_node_is_not_deleted(tmp_path: Path) -> None:
    primary = sl.node.Primary.open(tmp_path / "node", name="a")
    with primary, pytest.raises(Unsupported, match="log of a node"):
        sl.bulk.delete(primary.url)
    (copy,) = (tmp_path / "node").glob("data-*")
    with pytest.raises(Unsupported, match="copy of a node"):
        sl.bulk.delete(f"wal://{copy}")


def test_where_there_is_no_log_nothing_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    for url in (f"file://{tmp_path}", f"wal://{tmp_path}", f"file://{tmp_path}/nowhere"):
        with pytest.raises((NotALog, StrandlineError)):
            sl.bulk.delete(url)
    assert (tmp_path / "mine").read_text() == "stays"


# --- what goes, and what stays ---------------------------------------------------------------------------------


@SCHEMES
def test_files_of_others_stay(tmp_path: Path, scheme: str) -> None:
    url = made(tmp_path, scheme)
    (tmp_path / "log" / "notes.txt").write_text("stays")
    sl.bulk.delete(url)
    assert (tmp_path / "log" / "notes.txt").read_text() == "stays"
    left = {path.name for path in (tmp_path / "log").rglob("*") if path.is_file()}
    assert {name for name in left if "lock" not in name} == {"notes.txt"}


@SCHEMES
@pytest.mark.parametrize("beside", [True, False], ids=["beside the log", "elsewhere"])
def test_a_cold_tier_beside_the_log_goes_and_another_one_stays(tmp_path: Path, scheme: str, *, beside: bool) -> None:
    url = made(tmp_path, scheme)
    with sl.open(url) as log:
        sl.tier.attach(log, None if beside else (tmp_path / "elsewhere").as_uri())
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)
    cold = tmp_path / ("log/cold" if beside else "elsewhere")
    assert list(cold.rglob("*.parquet"))
    done = sl.bulk.delete(url)
    assert done.keeps_cold_tier is not beside
    assert done.cold_tier == cold.as_uri()
    assert bool(list(cold.rglob("*.parquet"))) is not beside


def test_a_producer_that_still_runs_fails_and_brings_nothing_back() -> None:
    place = PlainStore()
    log = opened(place)
    producer = log.producer(linger=3600.0)
    producer.append(value=b"a")
    producer.flush()
    sl.bulk.delete(place)
    producer.append(value=b"b")
    with pytest.raises(StrandlineError):
        producer.flush()
    with pytest.raises(StrandlineError):
        producer.close()
    assert not [item.path for item in place.list("") if not item.path.startswith("batches/")]


def test_a_producer_of_the_deleted_log_changes_nothing_of_the_log_that_was_made_there_afterwards() -> None:
    place = PlainStore()
    producer = opened(place).producer(linger=3600.0)
    for _ in range(SPILL_AT + 1):  # its next listing moves the oldest of these into a chunk
        producer.append(value=b"old")
        producer.flush()
    sl.bulk.delete(place)
    again = opened(place, seed=2)
    for number in range(SPILL_AT + 2):  # this log has a chunk of that name, too
        append(again, b"%d" % number, number=number)
    chunks = {item.path: place.get(item.path).data for item in place.list("chunks/")}
    assert chunks
    producer.append(value=b"late")
    with pytest.raises(Diverged, match="was replaced"):
        producer.flush()
    with pytest.raises(StrandlineError):
        producer.close()
    assert {item.path: place.get(item.path).data for item in place.list("chunks/")} == chunks
    assert [value for _, value in content(open_log(place))] == [b"%d" % number for number in range(SPILL_AT + 2)]


def test_a_trim_round_of_the_deleted_log_deletes_nothing_of_the_log_that_was_made_there_meanwhile() -> None:
    place = PlainStore()
    line = FaultyStore(place)
    old = filled(line)
    for _ in range(3):
        old.trim()
    again: list[ObjectLog] = []

    def hook(call: Any) -> None:
        if (call.name, call.stage, call.path) == ("list", "before", "batches/") and not again:
            sl.bulk.delete(place)
            again.append(opened(place, seed=2))
            append(again[0], b"kept", number=0)

    line.hook(hook)
    with pytest.raises(StrandlineError):
        old.trim(everything=True)
    assert again
    line.unhook()
    assert content(open_log(place)) == [(0, b"kept")]


def test_the_command_asks_names_what_goes_and_finishes(tmp_path: Path) -> None:
    run, url = CliRunner().invoke, made(tmp_path, "file", "billing")
    told = run(app, ["delete", url, "--dry-run", "--force", "--json"])
    assert json.loads(told.stdout)["slots"] == ["billing"]
    assert run(app, ["delete", url, "--force"]).exit_code == 1  # there is no terminal to ask
    refused = run(app, ["delete", url, "--yes"])
    assert refused.exit_code == 1
    assert "billing" in refused.stderr
    assert run(app, ["delete", url, "--yes", "--force"]).exit_code == 0
    assert run(app, ["delete", url, "--yes"]).exit_code == 1
