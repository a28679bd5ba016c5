"""A write-ahead log whose folder is moved, replaced or removed while it is open: it acknowledges nothing more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strandline.errors import LogFailed, NotFound, StrandlineError
from strandline.log.wal.log import ROLL_BYTES, WalLog
from strandline.storage.disk import DISK
from tests.contracts.logs import records

SOON = 120.0


def values(folder: Path) -> list[bytes]:
    with WalLog.open(str(folder), create=False) as log:
        return [value for batch in log.read() for value in batch.column("value").to_pylist()]


def moved(folder: Path) -> Path:
    return folder.rename(folder.parent / "elsewhere")


def replaced(folder: Path) -> Path:
    """Put another log in its place, as the restore of a backup does."""
    aside = moved(folder)
    shutil.copytree(folder.parent / "backup", folder)
    return aside


def parent_moved(folder: Path) -> Path:
    return folder.parent.rename(folder.parent.parent / "other") / folder.name


def files_moved(folder: Path) -> Path:
    aside = folder.parent / "aside"
    aside.mkdir()
    for path in list(folder.iterdir()):
        path.rename(aside / path.name)
    return aside


def link_turned(folder: Path) -> Path:
    """The path was a link, and leads to a copy now."""
    target = folder.resolve()
    folder.unlink()
    folder.symlink_to(shutil.copytree(target, folder.parent / "copy"))
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "logs" / "orders"
    place.parent.mkdir()
    with WalLog.open(str(place)) as log:
        log.append_value(b"first").result(SOON)
    shutil.copytree(place, place.parent / "backup")
    return place


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("away", [moved, replaced, parent_moved, files_moved])
def test_nothing_is_acknowledged_once_the_files_of_the_log_are_elsewhere(
    folder: Path, away: Callable[[Path], Path], background: bool
) -> None:
    log = WalLog.open(str(folder), background=background)
    log.append_value(b"before").result(SOON)
    there = away(folder)
    with pytest.raises(LogFailed, match="removed, moved or replaced"):
        log.append_value(b"after").result(SOON)
    with pytest.raises(LogFailed):
        log.append_value(b"later").result(SOON)
    log.close()
    assert values(there)[:2] == [b"first", b"before"], "what was acknowledged is where the files are"
    if away is replaced:
        assert values(folder) == [b"first"]


def test_a_link_that_leads_elsewhere_is_noticed(folder: Path) -> None:
    real = folder.rename(folder.parent / "real")
    folder.symlink_to(real)
    log = WalLog.open(str(folder))
    log.append_value(b"before").result(SOON)
    link_turned(folder)
    with pytest.raises(LogFailed, match="replaced"):
        log.append_value(b"after").result(SOON)
    log.close()


@pytest.mark.parametrize("change", [
    lambda log: log.trim(1),
    lambda log: log.slots.create("billing", 0),
    lambda log: log.append_value(b"after").result(SOON),
    lambda log: log.seal(),
    lambda log: log.append_batch(records(b"last"), seal=True).result(SOON),
], ids=["trim", "slot", "roll", "seal", "last batch"])  # fmt: skip
@pytest.mark.parametrize("roll_bytes", [0, ROLL_BYTES])
def test_a_replacement_at_its_path_is_not_touched(
    folder: Path, change: Callable[[WalLog], object], roll_bytes: int
) -> None:
    log = WalLog.open(str(folder), roll_bytes=roll_bytes)
    log.append_value(b"second").result(SOON)
    replaced(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises((NotFound, LogFailed), match="removed, moved or replaced"):
        change(log)
    with pytest.raises(StrandlineError):
        log.append_value(b"after").result(SOON)
    log.close()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_process_that_goes_to_another_folder_continues_with_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder.parent)
    file = DISK.open_append("file")
    monkeypatch.chdir(tmp_path)
    file.write([b"x"])
    file.sync()
    file.close()
    assert (folder.parent / "file").read_bytes() == b"x"


def test_a_folder_that_comes_back_is_the_same_one(folder: Path) -> None:
    log = WalLog.open(str(folder))
    there = moved(folder)
    os.rename(there, folder)
    log.append_value(b"after").result(SOON)
    log.close()
    assert values(folder) == [b"first", b"after"]
