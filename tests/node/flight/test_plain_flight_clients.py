"""Any Flight client can read the log by its ticket: nothing of ours is on the client's side here."""

import json

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from strandline.formats.node.wire import NOTE_SIZE
from strandline.model.records import READ_SCHEMA
from strandline.node.flight.server.server import FlightNode
from tests.node.flight.flight_double import Node, records


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path / "log")
    for value in (b"a", b"b", b"c"):
        node.log.append_batch(records(value, value + value)).result(120)
    yield node
    node.close()


@pytest.fixture
def client(node):
    with FlightNode(node, heartbeat_seconds=0.05) as server, fl.connect(server.url) as client:
        yield client


def ticket(**fields):
    return fl.Ticket(json.dumps(fields).encode())


def test_the_whole_log_is_found_and_read(node, client):
    (info,) = client.list_flights()
    assert info.schema == READ_SCHEMA
    assert info.total_records == 6
    assert info.descriptor.path == [str(node.log.log_id).encode()]
    table = client.do_get(info.endpoints[0].ticket).read_all()
    assert table.schema == READ_SCHEMA
    assert table.column("offset").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert table.column("value").to_pylist() == [b"a", b"aa", b"b", b"bb", b"c", b"cc"]


def test_an_empty_ticket_asks_for_the_whole_log(client):
    assert client.do_get(fl.Ticket(b"")).read_all().num_rows == 6


def test_a_ticket_asks_for_a_part_and_for_columns(node, client):
    since = f"{node.log.log_id}/0/1"
    part = client.do_get(ticket(since=since, upto=5, columns=["value", "offset"])).read_all()
    assert part.column_names == ["value", "offset"]
    assert part.column("offset").to_pylist() == [1, 2, 3, 4]
    descriptor = fl.FlightDescriptor.for_command(json.dumps({"since": since, "columns": ["offset"]}))
    info = client.get_flight_info(descriptor)
    assert (info.total_records, info.schema.names) == (5, ["offset"])
    assert client.get_schema(descriptor).schema.names == ["offset"]
    assert client.do_get(info.endpoints[0].ticket).read_all().num_rows == 5


def test_readers_see_no_more_than_what_is_committed(node, client):
    node.watermark = 3
    assert client.do_get(ticket()).read_all().num_rows == 3
    assert next(iter(client.list_flights())).total_records == 3
    with pytest.raises(fl.FlightUnavailableError, match="does not reach offset 5"):
        client.do_get(ticket(upto=5)).read_all()


def test_a_follower_gets_what_is_appended_later(node, client):
    reader = client.do_get(ticket(follow=True))
    seen = []
    for chunk in iter(reader.read_chunk, None):
        assert len(chunk.app_metadata) == NOTE_SIZE
        seen += chunk.data.column("value").to_pylist()
        if len(seen) == 6 and not chunk.data.num_rows:  # a heartbeat: it waits
            node.log.append_batch(records(b"later")).result(120)
        if len(seen) > 6:
            break
    assert seen[6:] == [b"later"]
    reader.cancel()


def test_a_follower_that_has_an_end_comes_to_it(node, client):
    assert client.do_get(ticket(follow=True, upto=4)).read_all().num_rows == 4


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "no object"),
        (b"[" * 60_000, "cannot be read"),
        (b" " * 70_000, "more than"),
        (b'{"since": 7}', "'since': Expected `str`, got `int`"),
        (b'{"since": "nonsense"}', "is no cursor"),
        (b'{"upto": -1}', r"Expected `int.* at `\$\.upto`"),
        (b'{"upto": 1e3}', r"Expected `int.* at `\$\.upto`"),
        (b'{"upto": 9223372036854775808}', r"Expected `int.* at `\$\.upto`"),
        (b'{"folow": true}', "folow"),
        (b'{"columns": ["nope"]}', "no column"),
        (b'{"replica": "r", "since": ""}', "'since': .* is no cursor"),
        (b'{"replica": "r"}', "for an exchange"),
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused_with_a_sentence(client, asked, why):
    with pytest.raises(fl.FlightServerError, match=why):
        client.do_get(fl.Ticket(asked)).read_all()


def test_a_cursor_of_another_log_is_refused(client):
    with pytest.raises(fl.FlightServerError, match="log"):
        client.do_get(ticket(since="00000000-0000-0000-0000-000000000007/0/0")).read_all()


def test_appending_takes_a_table_and_answers_where_it_is(node, client):
    table = pa.table({"key": pa.array(["k"]), "value": pa.array(["later"])})
    writer, answers = client.do_put(fl.FlightDescriptor.for_path("log"), table.schema)
    writer.write_table(table)
    writer.done_writing()
    said = json.loads(answers.read().to_pybytes())
    assert said.pop("repeated") is False
    assert said == {"first": 6, "count": 1, "outcome": "not-required", "bookmark": f"{node.log.log_id}/0/7"}
    writer.close()
    assert client.do_get(ticket(since=f"{node.log.log_id}/0/6")).read_all().column("value").to_pylist() == [b"later"]


def test_the_actions_are_listed_and_an_unknown_one_is_refused(client):
    assert "topology" in {action.type for action in client.list_actions()}
    found = json.loads(next(iter(client.do_action("bounds"))).body.to_pybytes())
    assert (found["first"], found["next"]) == (0, 6)
    with pytest.raises(fl.FlightServerError, match="no action 'nonsense'"):
        list(client.do_action("nonsense"))
    with pytest.raises(fl.FlightServerError, match="cannot be read"):
        list(client.do_action(fl.Action("register", b"\xff")))


def test_what_is_no_exchange_is_refused_as_one(client):
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b'{"follow": true}'))
    with pytest.raises(fl.FlightServerError, match="for a stream"):
        reader.read_chunk()
    with pytest.raises(fl.FlightServerError):
        writer.close()


def test_a_report_of_progress_that_is_none_is_refused(client):
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b'{"replica": "replica-1"}'))
    writer.write_metadata(b"nonsense")
    with pytest.raises(fl.FlightServerError, match="bytes"):
        reader.read_chunk()
    with pytest.raises(fl.FlightServerError):
        writer.close()
