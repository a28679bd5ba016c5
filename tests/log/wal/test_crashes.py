"""The write-ahead log on a disk that crashes, fails, fills and rots: at every operation, in every way."""

from __future__ import annotations

import logging

import pytest

from strandline.errors import CorruptData, NotALog, UnsupportedVersion
from strandline.testing.simdisk import (
    CrashMode,
    SimulatedDisk,
    crash_everywhere,
    fail_everywhere,
    fill_everywhere,
)
from tests.disk_doubles import damage_everywhere
from tests.log.wal.workload import check, open_on, payload, values, workload
from tests.matrix_cases import sampled


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Do not log warnings: each of thousands of torn tails would be one."""
    caplog.set_level(logging.ERROR)


def report(capsys, explored):
    with capsys.disabled():
        print(f"\n  write-ahead log: {explored}")


@pytest.mark.parametrize("every", sampled(211))
def test_a_crash_at_every_operation_in_every_mode_loses_nothing(capsys, every):
    explored = crash_everywhere(workload, check, every=every)
    report(capsys, explored)
    assert explored.states > 1000 / every


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_crash_while_the_first_is_being_repaired_loses_nothing(capsys):
    explored = crash_everywhere(
        workload, check, modes=(CrashMode.PREFIX, CrashMode.PAGES), seeds=(0,), limit=2, again=14
    )
    report(capsys, explored)
    assert explored.states > 1000


@pytest.mark.parametrize("every", sampled(45))
def test_an_operation_that_fails_loses_nothing_even_if_only_the_process_ends(capsys, every):
    modes = (CrashMode.KILL, CrashMode.NOTHING, CrashMode.SCRAPS)
    explored = fail_everywhere(workload, check, modes=modes, limit=3, every=every)
    report(capsys, explored)
    assert explored.states > 100 / every


@pytest.mark.parametrize("every", sampled(45))
def test_a_full_disk_loses_nothing_and_continues_once_there_is_room(capsys, every):
    modes = (CrashMode.KILL, CrashMode.NOTHING, CrashMode.SCRAPS)
    explored = fill_everywhere(workload, check, step=257 * every, modes=modes)
    report(capsys, explored)
    assert explored.states > 50 / every


@pytest.mark.parametrize("every", sampled(81))
def test_a_log_that_begins_anywhere_begins_there_after_every_crash(capsys, every):
    def begin(disk, notes):
        log = open_on(disk)
        end = log.bounds().next
        for offset in range(max(end, 5), 8):
            notes.append(log.append_value(payload(offset), expect=offset).result().first)
        log.close()

    def begun(disk, notes):
        log = open_on(disk)
        found = values(log)
        assert found == {offset: payload(offset) for offset in range(5, 5 + len(found))}
        assert set(notes) <= set(found)
        assert not found or log.bounds().first == 5
        disk.kill()

    explored = crash_everywhere(begin, begun, every=every)
    report(capsys, explored)
    assert explored.states > 100 / every


@pytest.mark.matrix
def test_the_same_seeds_explore_the_same_states():
    reach = {"modes": (CrashMode.SCRAPS,), "seeds": (3,), "limit": 2, "every": 9}
    assert crash_everywhere(workload, check, **reach) == crash_everywhere(workload, check, **reach)


@pytest.mark.parametrize("every", sampled(9))
def test_damage_below_the_mark_is_refused_or_does_not_matter_but_never_changes_anything(capsys, every):
    def refuse_or_hold(disk, notes):
        before = disk.files()
        try:
            open_on(disk.fork())
        except (CorruptData, UnsupportedVersion, NotALog):
            with pytest.raises((CorruptData, UnsupportedVersion, NotALog)):
                open_on(disk)
            assert {path: data for path, data in disk.files().items() if not path.endswith("lock")} == {
                path: data for path, data in before.items() if not path.endswith("lock")
            }
            return
        try:
            check(disk, notes)
        except CorruptData:
            return  # found when it is read

    explored = damage_everywhere(workload, refuse_or_hold, step=97 * every, piece=b"\x5a\xa5\x5a")
    report(capsys, explored)
    assert explored.states > 50 / every


def test_nothing_is_left_open_or_behind_by_the_workload():
    disk, notes = SimulatedDisk(), []
    workload(disk, notes)
    assert not [path for path in disk.files() if path.endswith((".new", ".torn"))]
    check(disk, notes)
