"""Nodes as processes of their own, with real sockets: run, look, promote, and what goes wrong."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.request import urlopen
from uuid import UUID

import pyarrow as pa
import pytest
from rich.console import Console

import strandline as sl
from strandline.cli.node.node_state import lines as lines_of
from strandline.cli.node.node_state import remarks, rendered
from strandline.errors import Diverged, StrandlineError
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ServerSecurity
from strandline.node.messages import Caller, Member, NodeStatus, Reached, Topology
from strandline.node.running import NodeConfig, RunningNode
from tests.cli.conftest import Run, Start

WAIT = 120.0
LEASE_SECONDS = 1.5


def table(*values: bytes) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.binary())})


def free_ports(count: int) -> list[int]:
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, however long a busy machine takes."""
    turn = threading.Event()
    for _ in range(int(WAIT / 0.05)):
        try:
            if condition():
                return
        except StrandlineError:
            pass  # nobody listens there yet
        turn.wait(0.05)
    raise AssertionError(f"not so after {WAIT} s: {what}")


@dataclass
class Nodes:
    """Three nodes of one log, each a process."""

    folder: Path
    start: Start
    more: tuple[str, ...] = ()
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.urls = dict(zip("abc", (f"grpc://127.0.0.1:{port}" for port in free_ports(3)), strict=True))

    def run(self, name: str, *more: str) -> dict[str, str]:
        """Start one; gives the line that it says when it serves."""
        self.begin(name, *more)
        return self.served(name)

    def begin(self, name: str, *more: str) -> None:
        others = [f"--node={other}={url}" for other, url in self.urls.items() if other != name]
        self.processes[name] = self.start(
            "node", "run", self.folder / name, "--name", name, "--listen", self.urls[name].removeprefix("grpc://"),
            "--lease", f"file://{self.folder}/lease", "--lease-seconds", LEASE_SECONDS,
            "--policy", "quorum(a,b,c)", "--json", "--quiet", *others, *self.more, *more,
        )  # fmt: skip

    def served(self, name: str) -> dict[str, str]:
        line = self.processes[name].stdout.readline()
        assert line, self.processes[name].communicate()
        return json.loads(line)

    def becomes(self, name: str, condition: str) -> None:
        with RemoteLog(self.urls[name], timeout=2.0) as node:
            until(lambda: node.status().condition == condition, f"{name} is {condition}")


@pytest.fixture
def nodes(tmp_path: Path, start: Start) -> Nodes:
    """A primary and two replicas that follow it."""
    nodes = Nodes(tmp_path, start)
    nodes.begin("a", "--create")
    for name in "bc":
        nodes.begin(name)
    for name in "abc":
        assert nodes.served(name)["url"] == nodes.urls[name]
    nodes.becomes("a", "leading")
    for name in "bc":
        nodes.becomes(name, "following")
    return nodes


@pytest.mark.matrix
def test_three_nodes_commit_and_show_their_offsets_and_one_takes_over_when_the_primary_is_killed(nodes, run: Run):
    with RemoteLog(nodes.urls["a"]) as log:
        assert isinstance(log.append(table(b"1", b"2"), timeout=WAIT).outcome, Reached)

    seen = json.loads(run("node", "topology", nodes.urls["a"], "--json").stdout)
    assert (seen["primary"], seen["term"], seen["policy"]) == ("a", 1, "quorum(a,b,c)")
    assert sorted(member["name"] for member in seen["members"]) == ["b", "c"]
    wrong = run("node", "topology", nodes.urls["b"])
    assert (wrong.exit_code, wrong.stderr) == (1, "error: b is no primary: ask a.\n")
    again = run("promote", nodes.urls["a"])
    assert (again.exit_code, again.stdout) == (0, "a is the primary already, in term 1. Nothing was changed.\n")

    nodes.processes["a"].kill()
    # Whichever of the two has more is the one that may.
    first, second = (run("promote", nodes.urls[name]) for name in "bc")
    leader = "b" if first.exit_code == 0 else "c"
    won, other = (first, second) if leader == "b" else (second, first)
    assert f"{leader} is the primary of term" in won.stdout
    assert "it has everything that quorum(a,b,c) had committed" in won.stdout
    assert other.exit_code == 1
    with RemoteLog(nodes.urls[leader]) as log:
        log.append(table(b"3"), timeout=WAIT).ensure()
        values = [value for batch in log.read() for value in batch.column("value").to_pylist()]
    assert values == [b"1", b"2", b"3"]

    nodes.run("a")  # it comes back, and follows
    nodes.becomes("a", "following")


def test_on_a_signal_a_node_ends_quietly_and_releases_the_lease(tmp_path, start):
    nodes = Nodes(tmp_path, start)
    nodes.run("a", "--create")
    nodes.becomes("a", "leading")
    process = nodes.processes["a"]
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=WAIT)
    assert (process.returncode, stdout, "Traceback" in stderr) == (0, "", False)
    assert json.loads((tmp_path / "lease" / "lease").read_bytes())["holder"] is None


@pytest.mark.slow
def test_with_a_quorum_a_node_takes_over_by_itself(tmp_path, start):
    nodes = Nodes(tmp_path, start, ("--automatic",))
    nodes.run("a", "--create")
    nodes.becomes("a", "leading")
    for name in "bc":
        nodes.run(name)
    with RemoteLog(nodes.urls["a"]) as log:
        until(lambda: isinstance(log.append(table(b"1"), timeout=1.0).outcome, Reached), "a quorum")
        count = log.bounds().next
        # Which of the two has everything, the lease does not know: both do, or the one that has takes over.
        until(lambda: {member.durable for member in log.topology().members} == {count}, "both are there")
    nodes.processes["a"].kill()

    def leader() -> str | None:
        for name in "bc":
            with RemoteLog(nodes.urls[name], timeout=2.0) as node:
                if node.status().condition == "leading":
                    return name
        return None

    until(leader, "somebody leads")
    with RemoteLog(nodes.urls[leader()]) as log:
        log.append(table(b"2"), timeout=WAIT).ensure()
        assert log.bounds().next == count + 1


class TestOneNode:
    """What a single process can tell."""

    @pytest.fixture
    def primary(self, tmp_path):
        config = NodeConfig(folder=str(tmp_path / "a"), name="a", lead=True, create=True, poll_seconds=0.2)
        with RunningNode(config) as running:
            yield running

    @pytest.fixture
    def replica(self, primary, tmp_path):
        config = NodeConfig(folder=str(tmp_path / "b"), name="b", upstream=primary.url, poll_seconds=0.2)
        with RunningNode(config) as running:
            assert running.wait_until(lambda: running.condition == "following", WAIT)
            yield running

    @pytest.mark.matrix
    def test_the_line_that_it_prints_when_it_serves_has_its_address_and_role(self, tmp_path, start):
        port = free_ports(1)[0]
        process = start(
            "node", "run", tmp_path / "a", "--name", "a", "--listen", "127.0.0.1:0", "--lead", "--create",
            "--metrics", f"127.0.0.1:{port}",
        )  # fmt: skip
        line = process.stdout.readline()
        assert line.startswith("a serves at grpc://127.0.0.1:")
        assert line.endswith(", and is leading.\n")
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT) as answer:
            assert b'strandline_term{node="a"} 1.0' in answer.read()
        process.send_signal(signal.SIGINT)
        assert "leads in term 1" in process.communicate(timeout=WAIT)[1]
        assert process.returncode == 0

    @pytest.mark.matrix
    def test_taking_over_a_write_ahead_log_it_leads_with_what_that_holds(self, tmp_path, start):
        with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
            wal.append_many([b"one", b"two"])
        process = start(
            "node", "run", tmp_path / "a", "--name", "a", "--listen", "127.0.0.1:0", "--lead", "--json", "--quiet",
            "--take-over", tmp_path / "wal",
        )  # fmt: skip
        url = json.loads(process.stdout.readline())["url"]
        with RemoteLog(url) as log:
            assert log.bounds().next == 2

    def test_in_the_folder_of_a_write_ahead_log_it_says_how_that_is_taken_over(self, tmp_path, run):
        sl.compat.WriteAheadLog.open(tmp_path / "wal").close()
        refused = run("node", "run", tmp_path / "wal", "--name", "a", "--lead", "--create")
        assert refused.exit_code == 1
        assert f"'strandline node run FOLDER --take-over {tmp_path}/wal'" in " ".join(refused.stderr.split())
        assert not (tmp_path / "wal/node.json").exists()

    def test_status_shows_the_state_of_a_node(self, primary, replica, run):
        leading = run("node", "status", primary.url)
        assert leading.stdout.startswith("a is leading, in term 1\n  durable below offset 0")
        assert json.loads(run("node", "status", replica.url, "--json").stdout)["condition"] == "following"

    def test_status_of_one_that_stopped_is_1_and_says_why_until_it_builds_its_copy_again(self, primary, replica, run):
        with RemoteLog(primary.url) as log:
            log.append(table(b"1"), policy="ack_n(1)", timeout=WAIT).ensure()
            replica._on_control_thread(lambda: replica.node.replica._stop(Diverged("The record is another one here.")))
            seen = run("node", "status", replica.url)
            assert seen.exit_code == 1
            assert "b is diverged" in seen.stdout
            assert "another one here" in seen.stdout
            refused = run("node", "rebootstrap", replica.url)
            assert refused.exit_code == 1
            assert "repeat it with --yes" in refused.stderr
            assert run("node", "rebootstrap", replica.url, "--yes").stdout.startswith("b builds its copy again")
            assert replica.wait_until(lambda: replica.condition == "following", WAIT)
            log.append(table(b"2"), policy="ack_n(1)", timeout=WAIT).ensure()

    def test_unregistering_forgets_a_replica(self, primary, run):
        primary.node.primary.register(Caller("c"))
        assert run("node", "unregister", primary.url, "c").exit_code == 1
        done = run("node", "unregister", primary.url, "c", "--yes")
        assert done.stdout.startswith("Replica 'c' is unregistered. It counts no longer, and its slot is dropped.")
        again = run("node", "unregister", primary.url, "c", "--yes")
        assert again.exit_code == 1
        assert "There is no replica 'c': nothing was changed. Registered: none." in " ".join(again.stderr.split())

    def test_nodes_are_added_and_removed_and_the_policy_changes(self, primary, replica, run):
        plain = run("node", "policy", primary.url)
        assert (plain.exit_code, plain.stdout) == (0, "local\n")
        added = run("node", "add", primary.url, f"b={replica.url}", "--json")
        assert [each["name"] for each in json.loads(added.stdout)["members"]["nodes"]] == ["a", "b"]
        changed = run("node", "policy", primary.url, "ack_n(1)")
        assert changed.stdout.startswith(
            f"The log commits under ack_n(1).\n  members  a={primary.url}, b={replica.url}"
        )
        assert "membership" in run("node", "topology", primary.url).stdout
        assert "membership" in run("node", "status", replica.url).stdout
        assert json.loads(run("node", "policy", primary.url, "--json").stdout)["policy"] == "ack_n(1)"
        for given, why in (
            (["remove", primary.url, "a", "--yes"], "promote another node first"),
            (["remove", primary.url, "b"], "repeat it with --yes"),
            (["remove", primary.url, "b", "--yes"], "cannot be reached with 0 replicas"),
            (["add", primary.url, "c"], "write NAME=grpc://host:port"),
            (["policy", primary.url, "--cancel"], "nothing to take back"),
            (["policy", primary.url, "local", "--cancel"], "leave out POLICY"),
            (["policy", primary.url, "local", "--force"], "repeat it with --yes"),
            (["policy", replica.url, "local", "--timeout", "0"], "b is no primary: ask a"),
        ):
            refused = run("node", *given)
            assert (refused.exit_code, why in " ".join(refused.stderr.split())) == (1, True), refused.stderr
        assert run("node", "policy", primary.url, "local", "--json").exit_code == 0
        removed = run("node", "remove", primary.url, "b", "--yes")
        assert removed.stdout.startswith("b is no node of the log any more.\n"), removed.output

    def test_a_change_that_is_not_complete_in_time_has_status_1_and_can_be_taken_back(self, primary, replica, run):
        run("node", "add", primary.url, f"b={replica.url}")
        primary.node.primary.membership.complete = lambda _: False
        waiting = run("node", "policy", primary.url, "ack_n(1)", "--timeout", "0")
        assert (waiting.exit_code, "goes on by itself" in " ".join(waiting.stderr.split())) == (1, True)
        assert "pending" in run("node", "topology", primary.url).stdout
        del primary.node.primary.membership.complete
        back = run("node", "policy", primary.url, "--cancel")
        assert (back.exit_code, back.stdout.splitlines()[0]) == (0, "The log commits under local.")

    def test_the_key_for_tickets_is_rotated_on_demand(self, primary, run):
        before = primary.node.node_folder.tickets.keys()[0]
        assert run("node", "rotate-keys", primary.url).stdout.startswith("The key for tickets is rotated.")
        assert primary.node.node_folder.tickets.keys()[0].key != before.key

    def test_a_refused_promotion_has_status_1_and_the_reason_and_forcing_it_needs_a_confirmation(
        self, primary, replica, run
    ):
        primary.close()
        refused = run("promote", replica.url)
        assert refused.exit_code == 1
        assert "b was not promoted: the policy is local" in refused.stderr
        unsure = run("promote", replica.url, "--force")
        assert unsure.exit_code == 1
        assert "repeat it with --yes" in unsure.stderr
        assert not replica.node.is_primary
        forced = run("promote", replica.url, "--force", "--yes", "--json")
        assert json.loads(forced.stdout)["promoted"] is True
        assert replica.node.is_primary

    def test_an_unreachable_node_is_reported_in_one_sentence(self, run):
        port = free_ports(1)[0]
        for command in (["promote"], ["node", "topology"], ["node", "status"], ["node", "rebootstrap"]):
            found = run(*command, f"grpc://127.0.0.1:{port}")
            assert found.exit_code == 1
            assert found.stderr.splitlines()[-1].startswith(f"error: No node answers at grpc://127.0.0.1:{port}")

    def test_tokens_are_asked_for_and_shown(self, tmp_path, run):
        tokens, mine = tmp_path / "tokens", tmp_path / "mine"
        tokens.write_text("ops client,admin a-token-that-is-long-enough\n")
        mine.write_text("a-token-that-is-long-enough\n")
        config = NodeConfig(
            folder=str(tmp_path / "a"), name="a", lead=True, create=True, server=ServerSecurity.load(tokens=str(tokens))
        )
        with RunningNode(config) as primary:
            assert "no token" in run("node", "topology", primary.url).stderr
            assert "a leads in term 1" in run("node", "topology", primary.url, "--token", mine).stdout

    @pytest.mark.matrix
    def test_certificates_have_the_roles_that_the_command_names_and_any_other_is_a_client_s(
        self, tmp_path, start, run, certificate_folder
    ):
        def shown(name):
            given = {"--ca": "ca.pem", "--cert": f"{name}.pem", "--key": f"{name}.key"}
            return [word for option, file in given.items() for word in (option, certificate_folder / file)]

        process = start(
            "node", "run", tmp_path / "a", "--name", "a", "--listen", "127.0.0.1:0", "--lead", "--create", "--json",
            "--quiet", *shown("node"), "--client-ca", certificate_folder / "ca.pem", "--identity", "replica-2=admin",
        )  # fmt: skip
        url = json.loads(process.stdout.readline())["url"]
        for name in ("replica-1", "by-other-name"):  # the latter is replica-2
            assert "a leads in term 1" in run("node", "topology", url, *shown(name)).stdout
        refused = run("node", "unregister", url, "c", "--yes", *shown("replica-1"))
        assert (refused.exit_code, "'replica-1' may not do this" in refused.stderr) == (1, True)
        permitted = run("node", "unregister", url, "c", "--yes", *shown("by-other-name"))
        assert (permitted.exit_code, "There is no replica 'c'" in permitted.stderr) == (1, True)


WRONG = [
    (["--lead", "--identity", "ops=admin"], 1, "--identity names certificates: it needs --client-ca"),
    (["--lead", "--identity", "ops=king", "--client-ca", "/nowhere/ca"], 1, "names no identity"),
    (["--lead", "--policy", "most"], 1, "no commit policy"),
    ([], 1, "no primary to follow"),
    (["--lead", "--automatic"], 1, "only with a lease and the policy quorum"),
    (["--lead", "--node", "b"], 1, "write NAME=grpc://host:port"),
    (["--lead", "--listen", "0.0.0.0:7450"], 1, "can be reached by other machines"),
    (["--lead", "--listen", "7450"], 2, "no address to listen on"),
    (["--lead", "--listen", "grpc://127.0.0.1:7450"], 2, "write host:port"),
    (["--lead", "--max-lag-bytes", "much"], 2, "not a size"),
    (["--lead", "--refuse-at", "1", "--slow-at", "2"], 1, "slowed before they are refused"),
    (["--lead", "--tokens", "/nowhere/tokens"], 1, "/nowhere/tokens"),
    (["--lead", "--cert", "/nowhere/cert"], 1, "/nowhere/cert"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "status", "why"), WRONG, ids=[why for _, _, why in WRONG])
def test_impossible_settings_are_refused_in_one_sentence_and_nothing_is_created(run, tmp_path, given, status, why):
    found = run("node", "run", tmp_path / "a", "--name", "a", *given)
    assert found.exit_code == status
    assert why in " ".join(found.stderr.replace("│", " ").split())
    assert not (tmp_path / "a").exists()


def member(name: str, **more: object) -> Member:
    known = Member(name, None, 5, 5, 5, 0, 0, 0, 1_000_000, bootstrapping=False, healthy=True)
    return replace(known, **more)


def shown(topology: Topology) -> list[str]:
    console = Console(width=100, highlight=False)
    with console.capture() as got:
        console.print(rendered(topology, {}, now=3_000_000))
    return [" ".join(line.split()) for line in got.get().splitlines()]


SEEN = Topology(UUID(int=7), "a", 3, 2, 9, "quorum(a,b,c)", 5, 4, ())


def test_a_topology_shows_the_state_of_each_replica():
    lines = shown(
        replace(
            SEEN,
            members=(
                member("b", region="eu"),
                member("c", applied=2, durable=1, apply_errors=1),
                member("d", healthy=False, divergences=2),
                member("e", bootstrapping=True, applied=None, durable=None),
            ),
        )
    )
    assert lines[0] == "a leads in term 3, which began at offset 2"
    assert "committed below offset 4; 1 record not yet" in lines
    assert "b eu 5 5 5 0 2.0 s up to date" in lines
    assert "c - 5 2 1 3 2.0 s behind; 1 apply error" in lines
    assert "d - 5 5 5 0 2.0 s silent; 2 divergences" in lines
    assert "e - 5 - - - 2.0 s bootstrapping" in lines


def test_a_status_shows_divergences_and_an_unknown_watermark():
    seen = NodeStatus("b", "connecting", None, 3, "a", sl.Cursor(UUID(int=7), 5), None, divergences=2)
    assert [str(line) for line in lines_of(seen)] == [
        "b is connecting, in term 3",
        "  durable below offset 5, how much of it is committed is not known yet, and readers have to wait",
        "  it has found 2 divergences so far",
    ]
    leading = replace(seen, name="a", condition="leading", committed=5, divergences=1)
    assert [str(line) for line in lines_of(leading)][1:] == [
        "  durable below offset 5, readers see up to 5",
        "  its replicas have reported 1 divergence so far",
    ]


def test_a_topology_warns_when_the_quorum_is_lost_or_at_risk():
    assert list(remarks(SEEN)) == ["No quorum: b, c missing. Appends are durable on a, and not committed."]
    two = replace(SEEN, members=(member("b"), member("c", healthy=False)))
    assert list(remarks(two)) == ["c missing: no other voter may be lost, or nothing is committed any more."]
    assert list(remarks(replace(SEEN, members=(member("b"), member("c"))))) == []
    assert list(remarks(replace(SEEN, policy="local"))) == []
