"""Names that come from outside are plain names, and a log whose files are gone acknowledges nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest

from strandline.errors import CorruptData, InvalidInput, LogFailed, StrandlineError
from strandline.formats.json.fields import Fields
from strandline.formats.node.ticket import decode_ticket
from strandline.model.addresses import check_replica_name
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.messages import Topology
from strandline.node.node_folder import NodeFolder
from strandline.storage.disk import below
from tests.matrix_cases import some
from tests.node.flight.attacked_node import ONE, Victim
from tests.node.processes import Nest

HOSTILE = ["../../x", "..", ".", "", "/etc", "a/b", "a\\b", "a\0b", "a\n", ".hidden", "x" * 129, "strandline-tier",
           "a.bootstrap"]  # fmt: skip


@pytest.fixture(scope="module")
def victim(nest: Nest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Victim(nest, tmp_path_factory.mktemp("victim")) as victim:
        yield victim


def test_no_name_makes_unregister_delete_a_folder(victim: Victim) -> None:
    bystander = victim.folder / "x"
    bystander.mkdir()
    (bystander / "letter").write_text("dear")
    before = sorted(str(path) for path in victim.folder.rglob("*") if path.is_file())
    for name in ["../../../x", *HOSTILE]:
        with pytest.raises(fl.FlightServerError, match="name"):
            victim.act("unregister", {"name": name, "term": 0})
    assert (bystander / "letter").read_text() == "dear"
    assert sorted(str(path) for path in victim.folder.rglob("*") if path.is_file()) == before
    victim.check_serves()


@pytest.mark.parametrize("action", ["register", "unregister", "resume", "begin-snapshot", "end-snapshot", "report"])
def test_every_action_refuses_a_name_that_is_a_path(victim: Victim, action: str) -> None:
    more = {"begin-snapshot": {"kind": "wal"}, "end-snapshot": {"cursor": f"{'0' * 8}-0000-0000-0000-{'0' * 12}/0/0"}}
    for name in ("../x", "..", "a/b"):
        with pytest.raises(fl.FlightServerError, match="no plain name"):
            victim.act(action, {"name": name, "term": 0, **more.get(action, {})})


@pytest.mark.parametrize("ticket", [
    b'{"replica": "../x"}',
    b'{"replica": "..", "term": 0, "since": "00000000-0000-0000-0000-000000000000/0/0"}',
    b'{"replica": "a", "term": 0, "snapshot": "../..", "path": "a", "offset": 0, "limit": 1}',
])  # fmt: skip
def test_a_ticket_refuses_a_name_that_is_a_path(ticket: bytes) -> None:
    with pytest.raises(InvalidInput, match="no plain name"):
        decode_ticket(ticket)


def test_a_primary_cannot_make_a_replica_remember_a_path_as_a_name(tmp_path: Path) -> None:
    member: dict[str, Any] = dict.fromkeys(
        ("sent", "applied", "durable", "apply_errors", "divergences", "connected_at", "last_seen"), 0
    )
    member |= {"region": None, "bootstrapping": False, "healthy": True}
    numbers = dict.fromkeys(("term", "term_start", "epoch", "durable", "committed", "first"), 0)
    topology = {"log_id": f"{'0' * 8}-0000-0000-0000-{'0' * 12}", "primary": "p", "policy": "local", **numbers}
    Fields({**topology, "members": [{"name": "a", **member}]}, "it", wrong=CorruptData).record(Topology)
    for wrong in (
        {**topology, "members": [{"name": "../a", **member}]},
        {**topology, "primary": "../p", "members": []},
    ):
        with pytest.raises(CorruptData, match="no plain name"):
            Fields(wrong, "it", wrong=CorruptData).record(Topology)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_replica_is_called_like_a_path_or_like_one_of_the_logs_own_slots(name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot name a replica"):
        check_replica_name(name)


def test_a_folder_has_no_paths_that_lead_out_of_it(tmp_path: Path) -> None:
    with NodeFolder.open(str(tmp_path / "a"), "a") as home:
        assert home.path("snapshots", "b") == f"{tmp_path}/a/snapshots/b"
        for name in ("..", ".", "", "a/b", "/", "a\\b", "a\0"):
            with pytest.raises(InvalidInput, match="no plain name"):
                home.path("snapshots", name)
            with pytest.raises(InvalidInput, match="no plain name"):
                below("/data", name)


def leads(log: RemoteLog) -> bool:
    try:
        return log.status().condition == "leading"
    except StrandlineError:  # it has stopped, or is about to
        return False


def move(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")


@pytest.mark.parametrize("lose", some([move, shutil.rmtree], 1))
def test_a_node_whose_files_are_gone_acknowledges_nothing_and_says_so(
    nest: Nest, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    with Victim(nest, tmp_path) as victim, victim.connect() as log:
        log.append(ONE).ensure()
        lose(victim.data)
        with pytest.raises(LogFailed, match="removed"):
            log.append(ONE)
        victim.until(lambda: not leads(log), "it says that it leads no more")
        for _ in range(3):
            with pytest.raises(StrandlineError):
                log.append(ONE)
