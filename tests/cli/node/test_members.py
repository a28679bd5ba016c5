"""Odd arguments of ``strandline node add | remove | policy``, and Ctrl-C while a change is waited for."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.node.running import NodeConfig, RunningNode
from tests.cli.conftest import Run, Start

WAIT = 120.0
ODD = ["", "x" * 100_000, "\x1b[31m", "a b", "../b", "ü", "\udcff", "b\n", "b=c", "x.bootstrap"]


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[RunningNode]:
    with RunningNode(NodeConfig(folder=str(tmp_path / "a"), name="a", lead=True, create=True)) as running:
        yield running


def check_refused(run: Run, *arguments: object, why: str) -> None:
    """One sentence, without control characters and not of a page; a traceback is none of our errors."""
    found = run(*arguments)
    assert isinstance(found.exception, SystemExit), found.exception
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("error: ")
    assert why in " ".join(found.stderr.split())
    assert len(found.stderr) < 1000
    assert found.stderr.rstrip("\n").isprintable()


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
def test_what_cannot_name_a_node_is_refused_before_anything_is_asked(run: Run, name: str) -> None:
    nowhere = "grpc://127.0.0.1:1"
    adds = "names no node" if name in ("", "b=c") else "cannot name a replica"
    for arguments, why in (
        (("add", nowhere, f"{name}=grpc://h:1" if name != "b=c" else "b="), adds),
        (("remove", nowhere, name), "cannot name a replica"),
    ):
        check_refused(run, "node", *arguments, why=why)


def test_odd_addresses_and_policies_are_refused_and_change_nothing(primary: RunningNode, run: Run) -> None:
    wrong = ["h:1", "grpc://h", "grpc://h:99999", "grpc://h:1/p", "grpc://h:1\n", "grpc://ü:1", f"grpc://{'h' * 600}:1"]
    for url in wrong:
        check_refused(run, "node", "add", primary.url, f"x={url}", why="is no address of")
    check_refused(run, "node", "add", primary.url, "x=grpc://\udcff:1", why="UTF-8")
    for policy, why in {
        "": "is no commit policy",
        "\udcff": "UTF-8",
        "ack_n(0)": "at least 1 replica",
        "ack_n(1)": "cannot be reached with 0 replicas",
        f"ack_n({'9' * 4000})": "is no commit policy",
        "ack_n(1_0)": "is no commit policy",
        f"quorum({','.join(f'n{each}' for each in range(700))})": "which the log does not have",
        f"ack_n({'9' * 9000})": "of up to 4096",
        "quorum()": "needs voters",
        "quorum(b)": "names b, which the log does not have",
        "quorum(a,b)": "names b, which the log does not have",
        "regions(\x1b[31m=1)": "0 are registered there",
        " and ".join(["local"] * 2000): "Expected `str` of length <= 16384",
    }.items():
        check_refused(run, "node", "policy", primary.url, policy, "--timeout", 0, why=why)
    assert primary.node.primary.membership.known is None


def test_ctrl_c_while_a_change_is_waited_for_says_how_it_goes_on(primary: RunningNode, start: Start, run: Run) -> None:
    primary.node.primary.membership.complete = lambda _: False
    waiting = start("node", "add", primary.url, "b=grpc://127.0.0.1:1")
    assert waiting.stderr.readline().startswith("waits until membership 1 (a, b under local,")
    waiting.send_signal(signal.SIGINT)
    said, told = waiting.communicate(timeout=WAIT)
    assert (waiting.returncode, said) == (130, "")
    assert told.startswith("interrupted: a change that has begun goes on by itself")
    assert "'strandline node policy URL --cancel'" in told
    assert primary.node.primary.membership.known.former is not None
    del primary.node.primary.membership.complete
    again = run("node", "add", primary.url, "b=grpc://127.0.0.1:1", "--json")
    assert [each["name"] for each in json.loads(again.stdout)["members"]["nodes"]] == ["a", "b"]
