"""The public conformance suite of the protocol: its core tests pass on each kind of log, and forks are refused."""

import json
import os
import re
import subprocess
from collections import deque

import pytest

from strandline.node import Primary
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.streams import StreamRoot
from tests.serve.http.client import served
from tests.servers import HOME

CORE, OTHERS = 250, 6
"""Tests of the core, and those of subscriptions, which the suite leaves out unless they are asked for."""

FEW = 25
"""Tests of lifetimes of a second or two, which miss them beside others: they run again, one after the other."""

LIMITS = HttpLimits(long_poll_seconds=2)


NODES = 64
"""So many nodes are open at once: 250 in one process, which nobody has, keep a core busy with their idle threads."""


def opener_of_nodes():
    """Opens the log of each stream as a node of its own, and closes the oldest: the suite is done with its stream."""
    opened = deque()

    def opened_node(address, *, content_type):
        if len(opened) >= NODES:
            opened.popleft().close()
        node = Primary.open(address.removeprefix("wal://"), content_type=content_type)
        opened.append(node)
        return node

    return opened_node


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["memory", "file", "wal", "node"])
def test_the_core_of_the_suite_passes(kind, tmp_path):
    program = HOME / "bin/streams"
    if not program.exists():
        pytest.skip("no server: the conformance suite of Durable Streams (make services)")
    scheme = "wal" if kind == "node" else kind
    root = f"memory://{tmp_path.name}" if kind == "memory" else f"{scheme}://{tmp_path}/streams"
    with served(StreamRoot(root, opener=opener_of_nodes() if kind == "node" else None), limits=LIMITS) as http:
        core = run_core(program, http.port, tmp_path / "report.json")
        failed = {name: message for name, (status, message) in core.items() if status == "failed"}
        if 0 < len(failed) <= FEW:
            again = run_core(program, http.port, tmp_path / "again.json", failed)
            failed = {name: again[name][1] for name in failed if again[name][0] == "failed"}
    assert failed == {}
    assert sum(status in ("passed", "failed") for status, _ in core.values()) == CORE
    assert len(core) == CORE + OTHERS


def run_core(program, port, report, only=()):
    """Status and message of each test of the core, by its name; several at a time, as most of them wait."""
    names = (
        ["-t", "|".join(re.escape(name) for name in only)] if only else ["--sequence.concurrent", "--maxConcurrency=16"]
    )
    subprocess.run(
        [program, "--testTimeout", "60000", "--reporter=json", f"--outputFile={report}", *names],
        env={**os.environ, "STREAMS_URL": f"http://127.0.0.1:{port}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    found = [test for file in json.loads(report.read_text())["testResults"] for test in file["assertionResults"]]
    return {
        test["fullName"]: (test["status"], test["failureMessages"][:1])
        for test in found
        if not any("Fork" in title for title in test["ancestorTitles"])
    }
