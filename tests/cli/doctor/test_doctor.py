"""The doctor: what it finds well on good stores, and that it finds out bad ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path

import pytest

import strandline as sl
from strandline.cli.doctor import command, machine, place
from strandline.cli.doctor.lines import CheckStatus, Line
from strandline.cli.doctor.machine import Requirement
from strandline.cli.doctor.place import RACERS, StoreChecks, disk_line, log_lines
from strandline.errors import NotFound, StorageError, TransientStorageError
from strandline.log.object import open_log
from strandline.model.retention import SlotLimits
from strandline.storage.env import Env
from strandline.storage.objects.store import ABSENT, Payload, Precondition, Version
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import paths
from tests.cli.conftest import Run
from tests.contracts.slots import append

# --- stores ----------------------------------------------------------------------------------------------------


def said(store: PlainStore | FaultyStore, **options) -> dict[str, Line]:
    return {line.what: line for line in StoreChecks(store, **options).lines()}


def statuses(lines: dict[str, Line]) -> dict[str, CheckStatus]:
    return {what: line.status for what, line in lines.items() if line.status is not CheckStatus.OK}


def test_a_good_store_is_well_and_is_left_as_it_was():
    store = PlainStore()
    store.put("mine", b"x")
    lines = said(store)
    assert statuses(lines) == {}
    assert list(lines) == [
        "write",
        "read",
        "list",
        "create once",
        "replace if unchanged",
        "race to create",
        "race to replace",
        "clock",
        "delete",
    ]
    assert paths(store) == ["mine"]


def test_everything_is_written_below_one_folder():
    store = FaultyStore(PlainStore())
    looking = StoreChecks(store)
    list(looking.lines())
    assert {row.path.split("/")[0] for row in store.log} == {looking.folder}
    assert looking.folder.startswith("doctor-")


@pytest.mark.parametrize("server", ["s3_place", "azure_place"])
def test_a_real_server_is_well_and_is_left_as_it_was(server: str, request: pytest.FixtureRequest):
    store = request.getfixturevalue(server)()
    assert statuses(said(store)) == {}
    assert paths(store) == []


class IgnoresConditions(PlainStore):
    """Broken twin: overwrites whatever is there."""

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        self.put(path, data)
        return self.get(path).version


class IgnoresVersions(PlainStore):
    """Broken twin: creates once, as some stores do, and knows no condition on versions."""

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        if when == ABSENT:
            return super().put_if(path, data, when)
        return IgnoresConditions.put_if(self, path, data, when)


class LooksThenLeaps(PlainStore):
    """Broken twin: checks the condition and writes in two steps, and in a race all check before anyone writes."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(RACERS)

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        is_race = "/race-" in path and bytes(data) != b"start"
        free = path not in self._objects if when == ABSENT else self.get(path).version == when.version
        if is_race:
            self.barrier.wait()
        if not free or not is_race:
            return super().put_if(path, data, when)
        return IgnoresConditions.put_if(self, path, data, when)


class WritesAnyway(PlainStore):
    """Broken twin: refuses, and writes nevertheless."""

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        try:
            return super().put_if(path, data, when)
        except StorageError:
            self.put(path, data)
            raise


class ForgetsInListings(PlainStore):
    """Broken twin: what was written last is not listed yet."""

    def list(self, prefix, *, start_after=""):
        yield from list(super().list(prefix, start_after=start_after))[:-1]


class DeletesLater(PlainStore):
    """Broken twin: what is deleted stays for a while."""

    def delete(self, path: str) -> None:
        """Do nothing."""


CREATE, REPLACE = "create once", "replace if unchanged"
RACES = {"race to create", "race to replace"}


@pytest.mark.parametrize(
    ("twin", "problems"),
    [
        (IgnoresConditions, {CREATE, REPLACE, *RACES}),
        (IgnoresVersions, {REPLACE, "race to replace"}),
        (LooksThenLeaps, RACES),
        (WritesAnyway, {CREATE, REPLACE, *RACES}),
        (ForgetsInListings, {"list"}),
        (DeletesLater, {"delete"}),
    ],
)
def test_a_store_that_breaks_a_promise_is_found_out(twin: Callable[[], PlainStore], problems: set[str]):
    lines = said(twin())
    assert {what for what, status in statuses(lines).items() if status is CheckStatus.PROBLEM} == problems
    for what in problems - {"list", "delete"}:
        assert "keep no log here" in lines[what].said


def test_writers_that_all_win_a_race_are_counted():
    assert f"{RACERS} of {RACERS} writers won the same race" in said(LooksThenLeaps())["race to create"].said


def test_a_store_that_permits_no_writing_is_a_problem_and_nothing_else_is_tried():
    store = FaultyStore(PlainStore())
    store.fail_next("put", error=StorageError("The store did not let us in: check the credentials."))
    lines = said(store)
    assert statuses(lines) == {"write": CheckStatus.PROBLEM}
    assert list(lines) == ["write"]
    assert "check the credentials" in lines["write"].said


def test_an_address_where_nothing_can_be_made_is_a_problem():
    store = FaultyStore(PlainStore())
    store.fail_next("put", error=NotFound("There is nothing at /proc/x."))
    lines = said(store)
    assert statuses(lines) == {"write": CheckStatus.PROBLEM}
    assert "Nothing can be made at" in lines["write"].said


@pytest.mark.parametrize("name", ["get", "list", "put_if"])
def test_a_forbidden_operation_is_a_problem_and_the_others_are_still_tried(name):
    store = FaultyStore(PlainStore())
    store.fail_next(name, error=StorageError("The store did not let us in."))
    lines = said(store)
    assert list(statuses(lines).values()) == [CheckStatus.PROBLEM]
    assert len(lines) == 9


def test_objects_that_may_not_be_deleted_stay_and_are_reported():
    store = FaultyStore(PlainStore())
    store.fail_next("delete", times=99, error=StorageError("Deleting is not permitted."))
    lines = said(store)
    assert statuses(lines) == {"delete": CheckStatus.PROBLEM, "cleaning up": CheckStatus.WARNING}


def test_a_store_that_fails_for_a_moment_is_not_judged():
    store = FaultyStore(PlainStore())
    store.fail_next("put_if", error=TransientStorageError("The store is away."))
    lines = said(store)
    assert statuses(lines) == {CREATE: CheckStatus.WARNING}
    assert "could not be checked" in lines[CREATE].said


@pytest.mark.parametrize(
    ("off", "status", "which"),
    [
        (0, CheckStatus.OK, "within"),
        (4, CheckStatus.OK, "off"),
        (90, CheckStatus.WARNING, "behind"),
        (-90, CheckStatus.WARNING, "ahead of"),
    ],
)
def test_a_clock_that_is_far_off_the_store_s_is_a_warning(off: int, status: CheckStatus, which: str):
    ours = ManualClock()
    theirs = ManualClock(now=ours.now() + off * 1_000_000 + 1)
    line = said(PlainStore(clock=theirs), env=Env(clock=ours))["clock"]
    assert line.status is status
    assert which in line.said


def test_a_store_that_knows_only_whole_seconds_is_not_called_late():
    ours = ManualClock(now=1_700_000_000_900_000)
    theirs = ManualClock(now=1_700_000_000_000_000)
    assert "within a second" in said(PlainStore(clock=theirs), env=Env(clock=ours))["clock"].said


# --- the log in it, and the disk -------------------------------------------------------------------------------


def log_said(store: PlainStore, clock: ManualClock) -> dict[str, Line]:
    return {line.what: line for line in log_lines(store, env=Env(clock=clock))}


def test_a_log_is_described_and_needed_actions_are_warnings():
    clock, store = ManualClock(), PlainStore()
    assert log_said(store, clock)["log"] == Line(CheckStatus.OK, "log", f"there is none at {store.url} yet")
    log = open_log(store, create=True, retention="consumed", limits=SlotLimits(idle_seconds=60), env=Env(clock=clock))
    append(log, b"a", number=0)
    log.slots.create("billing", 0)
    assert statuses(log_said(store, clock)) == {}
    clock.advance(2 * 86400)
    assert statuses(log_said(store, clock)) == {"trim": CheckStatus.WARNING}
    for _ in range(2):
        log.trim()
        clock.advance(31)
    log.trim()
    lines = log_said(store, clock)
    assert statuses(lines) == {"slots": CheckStatus.WARNING}
    assert "'billing'" in lines["slots"].said
    store.put("head", b"")
    assert statuses(log_said(store, clock)) == {"log": CheckStatus.PROBLEM}


def test_times_ahead_of_this_machine_s_clock_are_reported_with_the_clock_and_the_distance():
    clock, store = ManualClock(), PlainStore()
    log = open_log(store, create=True, env=Env(clock=clock))
    clock.set_wall(clock.now() + 365 * 86400 * 1_000_000)
    append(log, b"a", number=0)
    log.slots.create("billing", 0)
    log.trim()
    clock.set_wall(clock.now() - 365 * 86400 * 1_000_000)
    told = [line for line in log_lines(store, env=Env(clock=clock)) if line.what == "times"]
    assert {line.status for line in told} == {CheckStatus.WARNING}
    assert all("365 d ahead of this machine's clock" in line.said for line in told)
    assert ["a trimmer's" in told[0].said, "a producer's" in told[1].said, "Slot 'billing'" in told[2].said] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("free", "status"), [(1 << 40, CheckStatus.OK), (1 << 29, CheckStatus.WARNING), (1, CheckStatus.PROBLEM)]
)
def test_a_disk_that_is_nearly_full_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: CheckStatus
):
    usage = place.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(place.shutil, "disk_usage", lambda _: usage._replace(free=free))
    line = disk_line(f"file://{tmp_path}/not/there/yet")
    assert line is not None
    assert line.status is status
    assert disk_line("s3://bucket/log") is None


# --- the machine -----------------------------------------------------------------------------------------------


HERE = Requirement("pyarrow", ">=1", "delta")
OLD = replace(HERE, versions="<2")
GONE = Requirement("no-such-package-anywhere", "", "delta")


def test_packages_that_are_missing_or_of_another_version_are_a_problem():
    assert machine.packages([HERE]).status is CheckStatus.OK
    for wrong in (OLD, GONE):
        line = machine.packages([HERE, wrong])
        assert line.status is CheckStatus.PROBLEM
        assert wrong.name in line.said


@pytest.mark.parametrize(
    ("needed", "status", "told"),
    [
        ([HERE], CheckStatus.OK, "pyarrow"),
        ([GONE], CheckStatus.OK, "pip install 'strandline[delta]'"),
        ([HERE, GONE], CheckStatus.WARNING, "no-such-package-anywhere"),
        ([OLD], CheckStatus.WARNING, "needs <2"),
    ],
)
def test_an_extra_may_be_there_or_not_and_half_of_one_is_a_warning(
    needed: list[Requirement], status: CheckStatus, told: str
):
    line = machine.of_extra("delta", "Delta tables", needed)
    assert line.status is status
    assert told in line.said


def test_requirements_are_read_from_the_package_metadata():
    needed = list(machine.requirements())
    assert {"pyarrow", "obstore"} <= {one.name for one in needed if one.extra is None}
    assert {"pyspark", "pandas"} <= {one.name for one in needed if one.extra == "spark"}


@pytest.mark.parametrize(
    ("printed", "status", "told"),
    [
        ('openjdk version "17.0.9" 2023-10-17', CheckStatus.OK, "17 at"),
        ('openjdk version "21" 2023-09-19', CheckStatus.OK, "21 at"),
        ('java version "1.8.0_381"', CheckStatus.PROBLEM, "Spark needs 17 or 21"),
        ("nothing of the kind", CheckStatus.PROBLEM, "does not say its version"),
    ],
)
def test_java_has_to_be_one_that_spark_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, status: CheckStatus, told: str
):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    line = machine.java(wanted=True)
    assert line.status is status
    assert told in line.said


def test_a_missing_java_is_a_problem_only_where_spark_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert machine.java(wanted=True).status is CheckStatus.PROBLEM
    assert machine.java(wanted=False).status is CheckStatus.OK


# --- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "machine", lambda: iter([Line(CheckStatus.OK, "Python", "fine")]))


@pytest.mark.usefixtures("_healthy")
def test_a_folder_that_was_not_there_is_not_there_afterwards(run: Run, tmp_path: Path) -> None:
    done = run("doctor", tmp_path / "some" / "where")
    assert done.exit_code == 0, done.output
    assert list(tmp_path.iterdir()) == []
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(lines)
    assert "one of 8 writers wins" in done.stdout


@pytest.mark.usefixtures("_healthy")
def test_a_log_is_as_it_was_after_the_doctor_has_been(run: Run, log: str) -> None:
    sl.open(log, create=True)
    before = sorted(Path(log).rglob("*"))
    assert run("doctor", log, "--json").exit_code == 0
    assert sorted(Path(log).rglob("*")) == before


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_a_problem_ends_with_status_1_and_a_warning_does_not(
    run: Run, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    found = [Line(CheckStatus.OK, "Python", "fine"), Line(CheckStatus(status), "Java", "Do something.")]
    monkeypatch.setattr(command, "machine", lambda: iter(found))
    done = run("doctor", "--json")
    assert done.exit_code == code
    fields = json.loads(done.stdout)
    assert fields["status"] == status
    assert fields["lines"][1] == {"status": status, "what": "Java", "said": "Do something."}
    assert f"{status:>8}  Java" in run("doctor").stdout


def test_the_real_machine_is_looked_at(run: Run) -> None:
    fields = json.loads(run("doctor", "--json").stdout)
    whats = [line["what"] for line in fields["lines"]]
    extras = sorted(set(metadata("strandline").get_all("Provides-Extra") or ()) - {"all", "dev"})
    assert whats == ["Python", "packages", "checksums", *(f"extra {name}" for name in extras), "Java"]
    assert not [line for line in fields["lines"] if line["said"].startswith("not installed")], "all are, for the tests"


@pytest.mark.usefixtures("_healthy")
def test_a_file_in_the_place_of_a_folder_is_a_problem_in_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("doctor", tmp_path / "file")
    assert done.exit_code == 1
    assert "problem  place" in done.stdout
