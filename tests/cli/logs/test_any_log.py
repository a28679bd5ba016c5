"""Commands on logs of every kind: the same words for an object log, a write-ahead log and the log of a node."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.cli.logs.tail import _batches
from strandline.cli.shared.any_log import LogPlace
from strandline.log.wal.log import WalLog
from tests.contracts.logs import append

SOON = 60.0


def objects(folder: Path, opened: ExitStack) -> str:
    return (folder / "objects").as_uri()


def write_ahead_log(folder: Path, opened: ExitStack) -> str:
    return f"wal://{folder}/wal"


def node(folder: Path, opened: ExitStack) -> str:
    return opened.enter_context(sl.node.Primary.open(folder / "node")).url


KINDS: list[Callable[[Path, ExitStack], str]] = [objects, write_ahead_log, node]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as opened:
        yield request.param(tmp_path, opened)


def document(done: Any) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_log_is_produced_to_tailed_verified_and_its_slots_are_managed(run, url):
    create = [] if url.startswith("grpc") else ["--create"]
    made = document(run("produce", url, *create, "--key-separator", "=", "--json", given="k1=v1\nk2=v2\nk1=v3\n"))
    assert (made["records"], made["next"]) == (3, 3)
    lines = [json.loads(line) for line in run("tail", url, "--json").stdout.splitlines()]
    assert [(line["offset"], line["key"], line["value"]) for line in lines] == [
        (0, "k1", "v1"),
        (1, "k2", "v2"),
        (2, "k1", "v3"),
    ]
    assert run("tail", url, "--from", "2").stdout.endswith("k1  v3\n")
    assert document(run("slots", "create", url, "billing", "--at", "1", "--json"))["position"] == 1
    (slot,) = document(run("slots", url, "--json"))["slots"]
    assert (slot["slot"], slot["position"], slot["records_behind"]) == ("billing", 1, 2)
    (slot,) = document(run("lag", url, "--json"))["slots"]
    assert (slot["slot"], slot["records_behind"], slot["pins_floor"]) == ("billing", 2, True)
    assert slot["bytes_behind"] > 0
    for command in (["lag"], ["slots"]):
        assert "billing" in run(*command, url).stdout
    assert document(run("slots", "reset", url, "billing", "--at", "now", "--yes", "--json"))["position"] == 3
    found = document(run("verify", url, "--json"))
    assert (found["clean"], found["examined"]["records"], found["examined"]["slots"]) == (True, 3, 1)
    assert document(run("slots", "drop", url, "billing", "--yes", "--json"))["dropped"]
    refused = run("slots", "drop", url, "billing", "--yes")
    assert (refused.exit_code, "no slot 'billing'" in refused.stderr) == (1, True)


def test_a_plain_path_to_a_write_ahead_log_works_as_its_address(run, tmp_path):
    WalLog.open(tmp_path / "wal").close()
    assert run("produce", tmp_path / "wal", given="a\n").exit_code == 0
    assert run("tail", tmp_path / "wal").stdout.endswith("a\n")
    assert "clean: 1 record read" in run("verify", tmp_path / "wal").stdout


def test_a_write_ahead_log_is_read_beside_its_writer_and_changed_by_nobody_else(run, tmp_path):
    url = f"wal://{tmp_path}/wal"
    with sl.open(url, create=True) as log:
        append(log, b"a", number=0)
        log.slots.create("billing", 0)
        assert run("tail", url).stdout.endswith("a\n")
        assert "billing" in run("lag", url).stdout
        assert "as the process that writes the log last stored them" in run("lag", url).stdout
        for command in (["produce", url], ["slots", "drop", url, "billing", "--yes"]):
            refused = run(*command, given="b\n")
            assert refused.exit_code == 1
            assert "Traceback" not in refused.output
            assert len(refused.stderr.splitlines()) == 1
        assert log.bounds().next == 1


def test_an_append_that_a_node_refuses_ends_with_the_node_s_reason(run, tmp_path):
    with sl.node.Primary.open(tmp_path / "node", policy="ack_n(1)") as primary:
        refused = run("produce", primary.url, "--count", "3")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1] == (
        "error: ack_n(1) cannot be reached with 0 replicas: register more, or ask for fewer."
    )


def test_a_damaged_batch_of_a_node_s_log_is_found_and_the_others_are_read(run, tmp_path):
    with sl.node.Primary.open(tmp_path / "node") as primary:
        folder = primary.node.primary.log.folder
        for number in range(3):
            append(primary, b"value %d" % number, number=number)
    (file,) = Path(folder).glob("*.log")
    with sl.node.Primary.open(tmp_path / "node") as primary:
        file.write_bytes(file.read_bytes().replace(b"value 1", b"value X"))
        done = run("verify", primary.url)
        assert done.exit_code == 1, done.output
        assert "Offsets 1 to 1" in done.stdout
        assert "3 batches" in done.stdout
        assert "1 damaged" in done.stdout
        assert run("verify", primary.url, "--quick").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tail", "grpc://127.0.0.1:1"], "No node answers at grpc://127.0.0.1:1"),
        (["tail", "memory://x", "--token", "t"], "--token is for a node"),
        (["produce", "grpc://127.0.0.1:1"], "No node answers at grpc://127.0.0.1:1"),
        (["produce", "grpc://127.0.0.1:1", "--create"], "a node makes its own log"),
        (
            ["produce", "wal:///nowhere/at/all"],
            "There is no log at wal:///nowhere/at/all (there is no such folder): check the address, or make",
        ),
        (["trim", "grpc://127.0.0.1:1"], "takes an object log, and grpc://127.0.0.1:1 is the log of a node"),
        (["retention", "wal:///srv/x"], "takes an object log, and wal:///srv/x is a write-ahead log"),
        (["lag", "wal://orders"], "names no folder of this machine"),
        (["verify", "grpc://db1"], "is no address of a node"),
    ],
)
def test_a_wrong_address_or_option_is_one_sentence(run, arguments, sentence):
    done = run(*arguments, given="")
    assert done.exit_code == 1, done.output
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_node_that_knows_its_callers_is_shown_the_token(run, tmp_path):
    (tmp_path / "tokens").write_text("ops client secret-of-the-operators\n")
    (tmp_path / "token").write_text("secret-of-the-operators\n")
    security = sl.node.ServerSecurity.load(tokens=str(tmp_path / "tokens"))
    client = sl.node.ClientSecurity.load(token=str(tmp_path / "token"))
    with sl.node.Primary.open(tmp_path / "node", server=security, client=client) as primary:
        assert run("produce", primary.url, given="a\n").exit_code == 1
        assert run("produce", primary.url, "--token", tmp_path / "token", given="a\n").exit_code == 0
        assert run("tail", primary.url, "--token", tmp_path / "token").stdout.endswith("a\n")


def test_tail_follows_across_a_restart_of_the_node(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings: dict[str, Any] = {"listen": ("127.0.0.1", free.getsockname()[1])}
    found: list[bytes] = []
    first, last = threading.Event(), threading.Event()

    def follow(url: str) -> None:
        with LogPlace(url).reading() as log:
            for batch in _batches(log, log.start(), lambda _: None, follow=True, limit=4):
                found.extend(batch.column("value").to_pylist())
                (last if len(found) == 4 else first).set()

    with sl.node.Primary.open(tmp_path / "node", **settings) as primary:
        append(primary, b"0", b"1", number=0)
        follower = threading.Thread(target=follow, args=(primary.url,), daemon=True)
        follower.start()
        assert first.wait(SOON)
    with sl.node.Primary.open(tmp_path / "node", **settings) as primary:
        append(primary, b"2", b"3", number=1)
        assert last.wait(SOON)
        follower.join(SOON)
    assert found == [b"0", b"1", b"2", b"3"]
    assert capsys.readouterr().err.count("Waiting for it.") <= 2


@pytest.mark.matrix
def test_a_node_that_is_killed_again_and_again_is_produced_to_and_tailed_without_a_loss_or_a_double(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"

    def run_node() -> Any:
        process = start(
            "node", "run", tmp_path / "node", "--name", "a", "--listen", place, "--lead", "--create", "--json"
        )
        assert json.loads(process.stdout.readline())["condition"] == "leading"
        return process

    node = run_node()
    tail = start("tail", f"grpc://{place}", "--from", "beginning", "--follow", "--limit", 400, "--json")
    with sl.node.RemoteLog(f"grpc://{place}", timeout=2.0) as log, log.producer(linger=0.0) as producer:
        handles, first = [], ""
        for turn in range(4):
            if turn:
                node.kill()
                node.wait(SOON)
            handles += [producer.append(value=b"%d" % (100 * turn + number)) for number in range(100)]
            if turn:
                node = run_node()
            producer.flush(SOON)
            first = first or tail.stdout.readline()
        assert [handle.result(0).first for handle in handles] == list(range(400))
    printed = tail.stdout.read()  # not communicate: it passes over what readline has buffered
    tail.wait(SOON)
    lines = [json.loads(line) for line in (first + printed).splitlines()]
    assert [(line["offset"], line["value"]) for line in lines] == [(number, f"{number}") for number in range(400)]
    assert tail.returncode == 0
