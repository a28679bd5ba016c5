"""Commands that are pointed at the wrong kind of thing say what it is and what is meant, and change nothing."""

from __future__ import annotations

import pytest

from tests import path_contents
from tests.matrix_cases import some

TARGET = "TARGET"
"""Stands for a path beside the place, where a command may write."""

WAL_COMMANDS = {
    "wal inspect": [],
    "wal repair": [],
    "wal repair --dry-run": [],
    "wal repair --forget-slots": [],
    "wal export": [TARGET],
    "wal migrate": [],
}
OBJECT_COMMANDS = {
    "verify": [],
    "tail": [],
    "produce --create": [],
}
EITHER_COMMANDS = {
    "tier attach": [],
    "tier run": [],
    "segments list": [],
}
QUEUE_COMMANDS = {"lag --format queue-v1": []}
NODE_COMMANDS = {"node run": ["--name", "a", "--lead", "--create", "--listen", "127.0.0.1:0"]}
ASKING_COMMANDS = {"node status": [], "node topology": [], "promote": ["--yes"]}

WAL, OBJECT, QUEUE, NODE = "write-ahead log", "object log", "queue of version 1", "folder of a node"
KINDS = {
    path_contents.wal: WAL,
    path_contents.object_log: OBJECT,
    path_contents.queue_v1: QUEUE,
    path_contents.topic: "topic",
    path_contents.node: NODE,
    path_contents.append_log_store: "append-log store",
    path_contents.rocksdb_store: "RocksDB store",
    path_contents.snapshot: "snapshot",
    path_contents.spool: "spool",
    path_contents.spool_beside: "spool",
    path_contents.empty: "empty folder",
    path_contents.file: "a file",
    path_contents.absent: "no such folder",
    path_contents.something_else: "folder of something else",
    path_contents.wal_and_append_log_store: "append-log store",
    path_contents.object_log_and_node: NODE,
    path_contents.object_log_over_wal: OBJECT,
}
MEANT = {
    path_contents.wal: "strandline verify",
    path_contents.object_log: "strandline verify",
    path_contents.queue_v1: "--format queue-v1",
    path_contents.node: "strandline node run",
    path_contents.spool: "strandline wal migrate",
    path_contents.spool_beside: "strandline wal migrate",
    path_contents.append_log_store: "as an AppendLogStore",
    path_contents.wal_and_append_log_store: "a folder of its own",
    path_contents.object_log_and_node: "a folder of its own",
    path_contents.object_log_over_wal: "a folder of its own",
}
MEANT_BY = {("node run", path_contents.wal): "strandline node run FOLDER --take-over"}
"""What one command means at a place, where that is not what every other command means there."""

RIGHT = {
    **{command: {path_contents.wal} for command in WAL_COMMANDS},
    "wal inspect": {path_contents.wal, path_contents.spool, path_contents.spool_beside},
    "wal migrate": {path_contents.spool, path_contents.spool_beside},
    **{command: {path_contents.object_log, path_contents.wal} for command in OBJECT_COMMANDS},
    "produce --create": {
        path_contents.object_log,
        path_contents.wal,
        path_contents.empty,
        path_contents.absent,
        path_contents.something_else,
        path_contents.queue_v1,
    },
    **{command: {path_contents.object_log, path_contents.wal} for command in EITHER_COMMANDS},
    "node run": {path_contents.node, path_contents.empty, path_contents.absent, path_contents.something_else},
    "lag --format queue-v1": {
        path_contents.queue_v1,
        path_contents.something_else,
        path_contents.empty,
        path_contents.absent,
    },
}
COMMANDS = WAL_COMMANDS | OBJECT_COMMANDS | EITHER_COMMANDS | QUEUE_COMMANDS | NODE_COMMANDS
CASES = [(command, make) for command in COMMANDS for make in KINDS if make not in RIGHT[command]]


def arguments(command, place, more):
    return [*command.split(), place, *(place.with_name("target") if word == TARGET else word for word in more)]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """One of each, made once: no command may change it."""
    made = {}
    for make in KINDS:
        made[make] = tmp_path_factory.mktemp(make.__name__) / "place"
        make(made[make])
    return made


@pytest.mark.parametrize(
    ("command", "make"), some(CASES, 60), ids=[f"{command}-{make.__name__}" for command, make in CASES]
)
def test_a_command_at_the_wrong_kind_of_place_says_what_it_is_and_changes_nothing(run, places, command, make):
    place = places[make]
    before = path_contents.state_of(place.parent)
    done = run(*arguments(command, place, COMMANDS[command]), given="")
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert KINDS[make] in done.stderr
    assert MEANT_BY.get((command, make), MEANT.get(make, "")) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "move it away" not in done.output
    assert path_contents.state_of(place.parent) == before


@pytest.mark.parametrize("command", ASKING_COMMANDS)
@pytest.mark.parametrize(
    "make", [path_contents.node, path_contents.wal, path_contents.absent], ids=lambda make: make.__name__
)
def test_a_command_that_asks_a_node_says_that_a_path_is_no_address(run, places, command, make):
    place = places[make]
    before = path_contents.state_of(place.parent)
    done = run(*arguments(command, place, ASKING_COMMANDS[command]))
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "grpc://host:port" in done.stderr
    assert path_contents.state_of(place.parent) == before


PLACES = (path_contents.object_log, path_contents.empty, path_contents.absent, path_contents.something_else)
OTHERS = [make for make in KINDS if make not in PLACES]


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_the_doctor_names_what_is_there_and_writes_nothing_beside_it(run, places, make, monkeypatch):
    monkeypatch.setattr("strandline.cli.doctor.command.machine", list)  # the same each time, and slow
    place = places[make]
    before = path_contents.state_of(place.parent)
    done = run("doctor", place)
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert KINDS[make] in done.output
    assert MEANT.get(make, "") in done.output
    assert path_contents.state_of(place.parent) == before


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_the_doctor_leaves_a_place_for_logs_as_it_was(run, places, make, monkeypatch):
    monkeypatch.setattr("strandline.cli.doctor.command.machine", list)
    place = places[make]
    before = path_contents.state_of(place.parent)
    done = run("doctor", place)
    assert done.exit_code == 0, done.output
    assert "create once" in done.output
    assert path_contents.state_of(place.parent) == before
