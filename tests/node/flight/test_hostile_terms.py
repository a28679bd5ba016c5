"""Terms that come from outside rise as elections raise them; whoever lies about one ends nothing for good."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.flight as fl
import pytest
from typer.testing import CliRunner

from strandline.cli.app import app
from strandline.errors import Fenced, InvalidInput
from strandline.formats.node.wire import Advance, encode_advance
from strandline.model.node import Membership
from strandline.node.flight.security import Grant, Role, ServerSecurity, parse_identities
from strandline.node.flight.server.caller_rights import CallerRights
from strandline.node.members.rules import members_of
from strandline.node.messages import Caller, ReplicaProgress
from strandline.node.node_folder import HIGHEST_TERM, TERM_STEP, NodeFolder, check_rise, plausible_term
from tests.node.flight.attacked_node import Victim
from tests.node.nodes_by_hand import Cluster
from tests.node.processes import Nest

LAST = (1 << 63) - 1
NOWHERE = f"{'0' * 8}-0000-0000-0000-{'0' * 12}/0/0"


@pytest.fixture(scope="module")
def victim(nest: Nest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Victim(nest, tmp_path_factory.mktemp("victim")) as victim:
        yield victim


@pytest.mark.parametrize("term", [LAST, TERM_STEP + 2])
def test_no_message_with_a_term_that_no_election_reaches_fences_a_primary(victim: Victim, term: int) -> None:
    calls = {
        "report": {},
        "register": {},
        "unregister": {},
        "resume": {"since": None},
        "begin-snapshot": {"kind": "wal"},
        "end-snapshot": {"cursor": NOWHERE},
        "topology": {},
    }
    for action, fields in calls.items():
        with pytest.raises(fl.FlightUnauthorizedError, match="no election raises it so far"):
            victim.act(action, {"name": "mallory", "term": term, **fields})
    with fl.connect(victim.url) as client:
        options = fl.FlightCallOptions(timeout=10)
        ticket = b'{"replica": "mallory", "term": %d, "since": "%s"}' % (term, NOWHERE.encode())
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(ticket), options)
        with pytest.raises(fl.FlightUnauthorizedError, match="no election"):
            reader.read_chunk()
        ticket = b'{"replica": "m", "term": %d, "snapshot": "s", "path": "p", "offset": 0, "limit": 1}' % term
        with pytest.raises(fl.FlightUnauthorizedError, match="no election"):
            client.do_get(fl.Ticket(ticket), options).read_all()
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b'{"replica": "mallory"}'), options)
        writer.write_metadata(encode_advance(Advance(term, 0, 0, 0, 0)))
        with pytest.raises(fl.FlightUnauthorizedError, match="no election"):
            reader.read_chunk()
    victim.check_serves()


def test_a_primary_that_has_seen_a_higher_term_leads_again_by_command(victim: Victim) -> None:
    victim.act("report", {"name": "mallory", "term": 3})
    with victim.connect() as log:
        victim.until(lambda: log.status().condition != "leading", "it has stepped down")
        assert log.promote().term > 3
    victim.check_serves()


def test_a_term_rises_by_a_bounded_step_and_never_to_where_there_is_no_next() -> None:
    assert check_rise(7, 7 + TERM_STEP, "a") == 7 + TERM_STEP
    for seen, told in ((7, 8 + TERM_STEP), (HIGHEST_TERM, HIGHEST_TERM + 1), (0, LAST)):
        with pytest.raises(Fenced, match="no election"):
            check_rise(seen, told, "a")
    assert plausible_term(4, 5, LAST) == 5


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    yield cluster
    cluster.close()


def test_a_primary_that_lies_about_its_term_spoils_no_replica(trio: Cluster) -> None:
    """By its registration, its topology, and its feed: each of them tells a term."""
    real = trio.nodes["a"].primary.heartbeat

    def lying(name: str, registration):
        return replace(registration, topology=replace(registration.topology, term=LAST))

    trio.nodes["a"].primary.heartbeat = lambda: real()._replace(term=LAST)
    trio.kill("b")
    trio.start("b")  # which asks for a new feed
    trio.until(lambda: trio.nodes["b"].condition == "fenced")
    trio.after["register"] = lying
    trio.step(50)
    assert [trio.nodes[name].node_folder.state.seen for name in "abc"] == [1, 1, 1]
    trio.nodes["a"].primary.heartbeat = real
    trio.after.clear()
    trio.settled("b", "c")


def test_a_lease_that_lies_about_its_epoch_makes_nobody_lead_in_a_last_term(trio: Cluster) -> None:
    trio.kill("a")
    forged = re.sub(rb'"epoch": \d+', b'"epoch": %d' % (LAST - 1), bytes(trio.store.get("lease").data))
    trio.store.put("lease", re.sub(rb'"holder": "[^"]*"', b'"holder": null', forged))
    with pytest.raises(Fenced, match="The lease reports term"):
        trio.nodes["b"].promote()
    assert trio.nodes["b"].node_folder.state.seen == 1
    trio.store.delete("lease")  # as the page on security says
    assert trio.nodes["b"].promote().term == 2


# --- the way back --------------------------------------------------------------------------------------------------


def spoiled(folder: Path, *, led: int = 1) -> None:
    """A node's folder as a version left it that believed every term."""
    with NodeFolder.open(str(folder), "a") as home:
        home.remember(seen=LAST, led=led)


@pytest.mark.parametrize("led", [1, LAST], ids=["never led in it", "was forced to lead in it"])
def test_a_node_that_once_believed_a_last_term_is_brought_back_by_command(tmp_path: Path, led: int) -> None:
    cluster = Cluster(tmp_path, policy="local", leased=False, names="a")
    cluster.start("a", create=True, lead=True)
    cluster.append(b"one")
    cluster.kill("a")
    spoiled(tmp_path / "a", led=led)
    if led == 1:
        with pytest.raises(Fenced, match="reset-term"):
            cluster.start("a", lead=True)
    ran = CliRunner().invoke(app, ["node", "reset-term", str(tmp_path / "a"), "--yes"])
    assert ran.exit_code == 0, ran.output
    assert "has seen term 1 now" in ran.output
    cluster.start("a", lead=True)
    assert cluster.append(b"two").result(0).receipt.first == 1
    cluster.kill("a")
    ran = CliRunner().invoke(app, ["node", "reset-term", str(tmp_path / "a"), "--yes"])
    assert "Nothing was changed" in ran.output
    ran = CliRunner().invoke(app, ["node", "reset-term", str(tmp_path / "a"), "--yes", "--to", "0"])
    assert (ran.exit_code, "records of term 1" in ran.output) == (1, True)


def test_the_term_of_the_recorded_members_is_not_forgotten(tmp_path: Path) -> None:
    """A primary of a lower term could neither change them nor hand them over."""
    with NodeFolder.open(str(tmp_path / "a"), "a") as home:
        home.remember(seen=9, led=1, membership=Membership(5, 2, members_of({"a": ""}, "local")))
    for more, found in ([], (0, "has seen term 5 now")), (["--to", "4"], (1, "members of term 5")):
        ran = CliRunner().invoke(app, ["node", "reset-term", str(tmp_path / "a"), "--yes", *more])
        assert (ran.exit_code, found[1] in " ".join(ran.output.split())) == (found[0], True), ran.output


# --- who may tell a term -------------------------------------------------------------------------------------------


def test_a_certificate_that_nobody_has_named_is_a_clients() -> None:
    security = ServerSecurity(b"pem", b"key", b"roots", identities=parse_identities(["b=replica", "ops=client,admin"]))
    for name, roles in {"b": {Role.REPLICA}, "ops": {Role.CLIENT, Role.ADMIN}, "stranger": {Role.CLIENT}}.items():
        assert security.grant_of(name) == Grant(name, frozenset(roles))
    session = CallerRights(security.grant_of("stranger"))
    with pytest.raises(Fenced, match="role replica"):
        session.replica("stranger", 9)


def test_no_term_is_accepted_from_an_administrator() -> None:
    ops = CallerRights(Grant("ops", frozenset({Role.ADMIN})))
    both = CallerRights(Grant("ops", frozenset({Role.ADMIN, Role.REPLICA})))
    assert ops.leaving_replica("b", 9) == both.leaving_replica("b", 9) == Caller("b", 0)
    assert both.leaving_replica("ops", 9) == Caller("ops", 9)


@pytest.mark.parametrize("wrong", ["b", "b=", "=replica", "b=king", "b=replica,", "b=Replica"])
def test_what_names_no_identity_is_a_mistake(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="names no identity"):
        parse_identities([wrong])
    with pytest.raises(InvalidInput, match="names no identity"):
        parse_identities(["b=client", "b=replica"])


def test_identities_without_certificates_are_a_mistake() -> None:
    with pytest.raises(InvalidInput, match="Identities name certificates"):
        ServerSecurity(identities={"b": frozenset({Role.REPLICA})})


def test_a_report_is_taken_of_progress_and_its_term_is_checked_before_anything_else(trio: Cluster) -> None:
    for tell in (trio.nodes["a"].primary.acknowledge, trio.nodes["a"].primary.acknowledge_nowait):
        with pytest.raises(Fenced, match="no election"):
            tell(Caller("b", LAST), ReplicaProgress(0, 0))
    assert trio.nodes["a"].is_primary
