"""The commands for write-ahead logs; what verifying finds is tried in tests/log."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.compat.spool.format import encode_record_frame
from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.formats.wal.index import INDEX_LEAD, decode_index, encode_entry, new_chain
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import firsts_in
from strandline.model.records import Op, record_batch
from strandline.storage.disk import DISK
from tests.cli.conftest import Run, Start

WHY = "no frame begins with 74 6f 72 6e"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed log with 200 records in four files, lsns 11 to 200 of which are retained, and a slot."""
    folder = tmp_path_factory.mktemp("wal") / "orders"
    with WriteAheadLog.open(folder, roll_bytes=30_000, background=False) as wal:
        for _ in range(4):
            handles = [wal.submit_batch(a_record()) for _ in range(50)]
            handles[-1].result()
        wal.log.slots.create("billing", 20)
        wal.log.slots.claim("billing", "worker-1")
        wal.prune_through(10)
    return folder


def a_record() -> pa.RecordBatch:
    return record_batch(timestamps=[1_700_000_000_000_000], ops=[Op.PUT], keys=[None], values=[b"v" * 50])


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "orders"))


def last_of(folder: Path) -> Path:
    return folder / f"{firsts_in(DISK.scan(str(folder)))[-1]:020d}.log"


def tear(folder: Path, tail: bytes = b"torn") -> int:
    """Leave something at the end of the last file; returns where."""
    path = last_of(folder)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + tail)
    return size


def damage(folder: Path) -> Path:
    path = folder / f"{firsts_in(DISK.scan(str(folder)))[1]:020d}.log"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_says_what_is_there_and_changes_nothing(run: Run, folder: Path) -> None:
    before = contents(folder)
    done = run("wal", "inspect", folder)
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert "state    closed" in text
    assert "offsets 10 to 199, 190 records, in term 0, as published" in text
    assert "billing" in text
    assert "worker-1" in text
    assert text.count(".log ") == 4
    fields = json.loads(run("wal", "inspect", folder, "--json").stdout)
    assert (fields["start"], fields["next"]) == (10, 200)
    assert (fields["state"], fields["problems"], fields["torn"]) == ("closed", [], [])
    assert [row["records"] for row in fields["files"]] == [50, 50, 50, 50]
    assert fields["slots"][0]["position"] == 20
    assert contents(folder) == before


def test_inspect_lists_each_frame(run: Run, folder: Path) -> None:
    done = run("wal", "inspect", folder, "--frames")
    assert done.exit_code == 0
    assert done.stdout.count(" 1 record ") == 200
    assert done.stdout.count(" begins         term 0 ") == 4
    assert "offset 199 " in done.stdout
    _, *frames = map(json.loads, run("wal", "inspect", folder, "--frames", "--json").stdout.splitlines())
    assert [row["first"] for row in frames if not row["lead"]] == list(range(200))
    assert frames[-1]["durable"] == 150


def test_inspect_shows_which_process_has_it_open(run: Run, folder: Path) -> None:
    with WriteAheadLog.open(folder, background=False) as wal:
        wal.append(b"one more")
        fields = json.loads(run("wal", "inspect", folder, "--json").stdout)
        assert (fields["state"], fields["next"]) == ("open", 201)
        assert f"open for writing by process {os.getpid()} on " in run("wal", "inspect", folder).stdout
        wal.append(b"and it goes on")


def test_inspect_distinguishes_a_process_that_died_and_a_machine_that_stopped(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    with WriteAheadLog.open(folder, background=False):
        unclean = (folder / "mark").read_bytes()
    (folder / "mark").write_bytes(unclean)
    gone = (folder / "lock").read_text().replace(f"process {os.getpid()} ", f"process {2**22 + 1} ")
    (folder / "lock").write_text(gone)
    assert json.loads(run("wal", "inspect", folder, "--json").stdout)["state"] == "died"
    monkeypatch.setattr("strandline.log.wal.inspect.boot_id", lambda: "another run of the machine")
    fields = json.loads(run("wal", "inspect", folder, "--json").stdout)
    assert (fields["state"], fields["published"], fields["next"]) == ("crashed", False, 200)
    assert before.keys() == contents(folder).keys()


def test_inspect_reads_a_damaged_log_as_far_as_it_goes(run: Run, folder: Path) -> None:
    path = damage(folder)
    (folder / "slots.json").write_bytes(b"{")
    (folder / "mark").unlink()
    tear(folder)
    done = run("wal", "inspect", folder, "--frames")
    assert done.exit_code == 0
    assert "problem  " in done.stdout
    assert "slots.json is damaged" in done.stdout
    assert done.stdout.count("no frame: ") == 2
    assert path.name in done.stdout
    (folder / "log.json").unlink()
    done = run("wal", "inspect", folder)
    assert done.exit_code == 0
    assert "log unknown" in done.stdout


def test_inspect_of_a_spool_shows_its_frames_by_version_and_its_end(run: Run, tmp_path: Path) -> None:
    spool = tmp_path / "orders.logical.wal"
    first = bytes.fromhex("52444c570105000000000000000300000000000000616263")
    third = b"".join(encode_record_frame(2, 6, 1000, b"hello"))
    spool.write_bytes(first + third + third[:9])
    for named in (spool, tmp_path / "orders"):
        done = run("wal", "inspect", named, "--frames")
        assert done.exit_code == 0, done.output
        assert "2 (1 of version 1, 1 of version 3), lsns 5 to 6" in done.stdout
        assert f"up to byte {len(first + third)} of {len(first + third) + 9}" in done.stdout
        assert "(torn); the last 9 bytes are ignored" in done.stdout
        assert "lsn 6 " in done.stdout
    fields = json.loads(run("wal", "inspect", spool, "--json").stdout)
    assert (fields["valid_bytes"], fields["ending"], fields["versions"]) == (
        len(first + third),
        "torn",
        {"1": 1, "3": 1},
    )


# --- verify ------------------------------------------------------------------------------------------------------


def test_a_whole_log_is_clean(run: Run, folder: Path) -> None:
    before = contents(folder)
    done = run("verify", folder)
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last.startswith("clean: 200 records read (")
    assert last.endswith("4 files, 200 frames, 1 slot; no damage, no waste, no notes")
    fields = json.loads(run("verify", folder, "--json").stdout)
    assert (fields["clean"], fields["damage"], fields["note"], fields["findings"]) == (True, 0, 0, [])
    assert contents(folder) == before


def test_damage_is_named_and_ends_with_status_1(run: Run, folder: Path) -> None:
    path = damage(folder)
    done = run("verify", folder)
    assert done.exit_code == 1
    assert f"damage  {path} is damaged at byte " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("DAMAGED: ")
    done = run("verify", folder, "--json")
    assert done.exit_code == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["severity"], finding["where"]) == ("damage", str(path))
    assert finding["byte"] <= 5000


def test_a_torn_tail_is_a_note_and_no_failure(run: Run, folder: Path) -> None:
    size = tear(folder)
    done = run("verify", folder)
    assert done.exit_code == 0
    assert f"a torn tail of 4 bytes from byte {size} on" in done.stdout
    assert "1 note" in done.stdout.splitlines()[-1]


@pytest.mark.matrix
def test_on_a_terminal_there_is_progress_and_it_leaves_the_result_alone(
    on_terminal: Callable[..., tuple[int, str]], folder: Path
) -> None:
    status, shown = on_terminal("verify", folder)
    assert status == 0
    assert "reading" in shown
    assert "clean" in shown


# --- repair ------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_exactly_what_would_be_cut_and_changes_nothing(run: Run, folder: Path) -> None:
    size = tear(folder)
    second = firsts_in(DISK.scan(str(folder)))[1]
    (folder / f"{second:020d}.index").unlink()
    (folder / "lock").unlink()
    before = contents(folder)
    done = run("wal", "repair", folder, "--dry-run")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"{last_of(folder).name}: 4 bytes would be cut, from byte {size:,} on, and set aside: {WHY}.",
        f"{second:020d}.index: would be rebuilt.",
        "Nothing was changed. It would hold offsets 10 up to 200.",
    ]
    fields = json.loads(run("wal", "repair", folder, "--dry-run", "--json").stdout)
    assert fields["cut"] == [{"file": last_of(folder).name, "byte": size, "size": 4, "why": WHY}]
    assert (fields["needed"], fields["dry_run"], fields["indexes"]) == (True, True, [f"{second:020d}.index"])
    assert contents(folder) == before


def test_repair_does_what_the_dry_run_said_and_then_there_is_nothing_left_to_do(run: Run, folder: Path) -> None:
    whole = contents(folder)
    size = tear(folder)
    second = firsts_in(DISK.scan(str(folder)))[1]
    (folder / f"{second:020d}.index").unlink()
    planned = json.loads(run("wal", "repair", folder, "--dry-run", "--json").stdout)
    done = run("wal", "repair", folder, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {**planned, "dry_run": False}
    now = contents(folder)
    piece = f"{last_of(folder).stem}.{size}.0.torn"
    assert now.pop(piece) == b"torn"
    assert {**now, "lock": b""} == {**whole, "lock": b""}
    assert run("verify", folder).exit_code == 0
    again = run("wal", "repair", folder)
    assert again.stdout.splitlines() == [
        "There is nothing to repair.",
        "The log is whole and closed. It holds offsets 10 up to 200.",
    ]


def test_a_file_that_was_never_finished_goes_as_a_whole(run: Run, folder: Path) -> None:
    path = folder / f"{200:020d}.log"
    path.write_bytes(b"RDLW")
    assert "4 bytes would be cut, as a whole," in run("wal", "repair", folder, "--dry-run").stdout
    assert "4 bytes were cut, as a whole," in run("wal", "repair", folder).stdout
    assert not path.exists()
    assert run("verify", folder).exit_code == 0


@pytest.mark.parametrize("which", [1, -1])
def test_a_wrong_index_is_made_again_also_where_it_would_keep_the_log_from_being_opened(
    run: Run, tmp_path: Path, which: int
) -> None:
    folder = tmp_path / "log"
    with WalLog.open(str(folder), roll_bytes=60_000, background=False) as log:
        for _ in range(4):
            handles = [log.append_batch(a_record()) for _ in range(70)]
            handles[-1].result()
        log_id = log.log_id
    first = firsts_in(DISK.scan(str(folder)))[which]
    path = folder / f"{first:020d}.index"
    whole = path.read_bytes()
    chain = new_chain(log_id, first)
    entry = decode_index(whole, chain).entries[0]
    path.write_bytes(INDEX_LEAD + encode_entry(entry._replace(position=entry.position + 100), chain)[0])
    tear(folder)
    before = contents(folder)
    assert f"{path.name}: would be rebuilt." in run("wal", "repair", folder, "--dry-run").stdout
    assert contents(folder) == before
    done = run("wal", "repair", folder)
    assert done.exit_code == 0, done.output
    assert path.read_bytes() == whole
    left = json.loads(run("verify", folder, "--json").stdout)["findings"]
    assert [finding["kind"] for finding in left] == ["piece"]


def test_damage_to_what_was_acknowledged_is_refused_and_nothing_is_changed(run: Run, folder: Path) -> None:
    path = damage(folder)
    tear(folder)
    before = contents(folder)
    for options in (["--dry-run"], [], ["--forget-slots"]):
        done = run("wal", "repair", folder, *options)
        assert done.exit_code == 1
        assert done.stdout == ""
        assert f"{path} is damaged at byte " in done.stderr
        assert "Restore the file" in done.stderr
        assert "nothing was changed" in done.stderr
        assert done.stderr.count("\n") == 1
        assert {**contents(folder), "lock": b""} == {**before, "lock": b""}


@pytest.mark.parametrize("slots", [None, b"", b"{}"])
def test_slots_are_forgotten_only_if_they_cannot_be_read_and_on_request(
    run: Run, folder: Path, slots: bytes | None
) -> None:
    whole = (folder / "slots.json").read_bytes()
    assert run("wal", "repair", folder, "--forget-slots").exit_code == 0
    assert (folder / "slots.json").read_bytes() == whole
    (folder / "slots.json").unlink() if slots is None else (folder / "slots.json").write_bytes(slots)
    before = contents(folder)
    done = run("wal", "repair", folder)
    assert done.exit_code == 1
    assert "--forget-slots" in done.stderr
    done = run("wal", "repair", folder, "--dry-run", "--forget-slots")
    assert done.exit_code == 0
    assert "would be replaced by one without slots" in done.stdout
    assert {**contents(folder), "lock": b""} == {**before, "lock": b""}
    done = run("wal", "repair", folder, "--forget-slots")
    assert done.exit_code == 0, done.output
    assert "records that were trimmed before may be seen again" in done.stdout
    if slots is not None:
        assert (folder / "slots.json.0.torn").read_bytes() == slots
    with WriteAheadLog.open(folder) as wal:
        assert (wal.oldest, wal.current, wal.log.slots.list()) == (1, 200, [])


def test_a_log_that_is_open_is_not_repaired_and_its_holder_is_named(run: Run, folder: Path) -> None:
    index = folder / f"{firsts_in(DISK.scan(str(folder)))[1]:020d}.index"
    index.unlink()
    with WriteAheadLog.open(folder, background=False) as wal:
        done = run("wal", "repair", folder)
        assert done.exit_code == 1
        assert not index.exists()
        assert f"process {os.getpid()} on " in done.stderr
        assert run("wal", "repair", folder, "--dry-run").exit_code == 0
        assert run("verify", folder).exit_code == 0
        assert wal.append(b"it goes on") == 201


# --- export and migrate ------------------------------------------------------------------------------------------


def test_what_is_exported_and_migrated_again_is_the_same(run: Run, folder: Path, tmp_path: Path) -> None:
    spool = tmp_path / "copy.logical.wal"
    before = contents(folder)
    done = run("wal", "export", folder, spool)
    assert done.exit_code == 0, done.output
    assert "holds 190 records (lsns 11 to 200, " in done.stdout
    assert contents(folder) == before
    assert run("wal", "export", folder, spool).exit_code == 1
    done = run("wal", "migrate", spool)
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'copy'} holds 190 records (lsns 11 to 200) and 1 slot; " in done.stdout
    assert run("verify", tmp_path / "copy").exit_code == 0
    with WriteAheadLog.open(folder) as ours, WriteAheadLog.open(tmp_path / "copy") as theirs:
        assert ours.read_since(10) == theirs.read_since(10)
        assert theirs.log.slots.list()[0].position == 20
    again = run("wal", "migrate", spool, "--json")
    assert again.exit_code == 1
    assert "already" in again.stderr


# --- how they end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["inspect"], ["repair"], ["repair", "--dry-run"], ["export"], ["migrate"]])
def test_where_there_is_nothing_the_error_is_one_sentence(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    command, *options = arguments
    rest = [tmp_path / "target"] if command == "export" else []
    done = run("wal", command, tmp_path / "nothing", *rest, *options)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: There is no ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
def test_ctrl_c_is_one_word(start: Start, folder: Path) -> None:
    (folder / "slots.json").unlink()
    os.mkfifo(folder / "slots.json")
    process = start("verify", folder)
    writer = os.open(folder / "slots.json", os.O_WRONLY)  # blocks until it is being read, which then waits for bytes
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=600)
    os.close(writer)
    assert (process.returncode, shown, said) == (130, "", "interrupted\n")


def test_the_help_names_every_command(run: Run) -> None:
    done = run("wal", "--help")
    for command in ("inspect", "repair", "export", "migrate"):
        assert command in done.stdout
    assert "wal" in run("--help").stdout


def test_a_spool_with_gaps_is_migrated_with_new_numbers_on_request_and_each_gap_is_reported(
    run: Run, tmp_path: Path
) -> None:
    frames = [b"".join(encode_record_frame(1, lsn, 0, b"%d" % lsn)) for lsn in (4, 5, 9, 7)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.logical.wal").write_bytes(b"".join(frames))
    refused = run("wal", "migrate", tmp_path / "a.logical.wal")
    assert refused.exit_code == 1
    assert "--renumber" in refused.stderr
    done = run("wal", "migrate", tmp_path / "a.logical.wal", "--renumber", "--json")
    assert done.exit_code == 0, done.output
    fields = json.loads(done.stdout)
    assert (fields["renumbered"], fields["missing"], fields["oldest"], fields["current"]) == (True, 3, 4, 7)
    assert fields["gaps"] == [
        {"index": 2, "after": 5, "found": 9, "missing": 3},
        {"index": 3, "after": 9, "found": 7, "missing": 0},
    ]
    told = run("wal", "migrate", tmp_path / "b.logical.wal", "--renumber").stdout
    assert "2 gaps with 3 lsns missing" in told
    assert "before record 2: missing 6-8" in told
    assert "before record 3: goes back, 7 after 9" in told


def test_a_spool_that_is_damaged_in_the_middle_is_refused_until_its_prefix_is_asked_for(
    run: Run, tmp_path: Path
) -> None:
    frames = [b"".join(encode_record_frame(1, lsn, 0, b"%d" % lsn)) for lsn in range(1, 6)]
    damaged = bytearray(b"".join(frames))
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "a.logical.wal").write_bytes(damaged)
    refused = run("wal", "migrate", tmp_path / "a")
    assert refused.exit_code == 1
    assert "'strandline wal migrate --valid-prefix'" in refused.stderr
    assert not (tmp_path / "a").exists()
    done = run("wal", "migrate", tmp_path / "a", "--valid-prefix")
    assert done.exit_code == 0, done.output
    assert "holds 2 records (lsns 1 to 2)" in done.stdout
