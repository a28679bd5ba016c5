"""Commands that are pointed at the wrong kind of thing say what it is and what is meant, and change nothing."""

from __future__ import annotations

import pytest

from tests import one_of_each as things
from tests.cases import some

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
    things.wal: WAL,
    things.object_log: OBJECT,
    things.queue_v1: QUEUE,
    things.topic: "topic",
    things.node: NODE,
    things.append_log_store: "append-log store",
    things.rocksdb_store: "RocksDB store",
    things.snapshot: "snapshot",
    things.spool: "spool",
    things.spool_beside: "spool",
    things.empty: "empty folder",
    things.file: "a file",
    things.absent: "no such folder",
    things.something_else: "folder of something else",
    things.wal_and_append_log_store: "append-log store",
    things.object_log_and_node: NODE,
    things.object_log_over_wal: OBJECT,
}
MEANT = {
    things.wal: "strandline verify",
    things.object_log: "strandline verify",
    things.queue_v1: "--format queue-v1",
    things.node: "strandline node run",
    things.spool: "strandline wal migrate",
    things.spool_beside: "strandline wal migrate",
    things.append_log_store: "as an AppendLogStore",
    things.wal_and_append_log_store: "a folder of its own",
    things.object_log_and_node: "a folder of its own",
    things.object_log_over_wal: "a folder of its own",
}
MEANT_BY = {("node run", things.wal): "strandline node run FOLDER --take-over"}
"""What one command means at a place, where that is not what every other command means there."""

RIGHT = {
    **{command: {things.wal} for command in WAL_COMMANDS},
    "wal inspect": {things.wal, things.spool, things.spool_beside},
    "wal migrate": {things.spool, things.spool_beside},
    **{command: {things.object_log, things.wal} for command in OBJECT_COMMANDS},
    "produce --create": {
        things.object_log,
        things.wal,
        things.empty,
        things.absent,
        things.something_else,
        things.queue_v1,
    },
    **{command: {things.object_log, things.wal} for command in EITHER_COMMANDS},
    "node run": {things.node, things.empty, things.absent, things.something_else},
    "lag --format queue-v1": {things.queue_v1, things.something_else, things.empty, things.absent},
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
    before = things.state_of(place.parent)
    done = run(*arguments(command, place, COMMANDS[command]), given="")
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert KINDS[make] in done.stderr
    assert MEANT_BY.get((command, make), MEANT.get(make, "")) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "move it away" not in done.output
    assert things.state_of(place.parent) == before


@pytest.mark.parametrize("command", ASKING_COMMANDS)
@pytest.mark.parametrize("make", [things.node, things.wal, things.absent], ids=lambda make: make.__name__)
def test_a_command_that_asks_a_node_says_that_a_path_is_no_address(run, places, command, make):
    place = places[make]
    before = things.state_of(place.parent)
    done = run(*arguments(command, place, ASKING_COMMANDS[command]))
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "grpc://host:port" in done.stderr
    assert things.state_of(place.parent) == before


PLACES = (things.object_log, things.empty, things.absent, things.something_else)
OTHERS = [make for make in KINDS if make not in PLACES]


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_the_doctor_names_what_is_there_and_writes_nothing_beside_it(run, places, make, monkeypatch):
    monkeypatch.setattr("strandline.cli.doctor.command.machine", list)  # the same each time, and slow
    place = places[make]
    before = things.state_of(place.parent)
    done = run("doctor", place)
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert KINDS[make] in done.output
    assert MEANT.get(make, "") in done.output
    assert things.state_of(place.parent) == before


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_the_doctor_leaves_a_place_for_logs_as_it_was(run, places, make, monkeypatch):
    monkeypatch.setattr("strandline.cli.doctor.command.machine", list)
    place = places[make]
    before = things.state_of(place.parent)
    done = run("doctor", place)
    assert done.exit_code == 0, done.output
    assert "create once" in done.output
    assert things.state_of(place.parent) == before
