"""Errors that leave a node: what they are called by then, and what the node's log says of them."""

import logging
import subprocess
import sys

import pytest

from strandline.errors import (
    CursorExpired,
    Fenced,
    InvalidInput,
    MissingExtra,
    NotReady,
    Overloaded,
    StorageError,
)
from strandline.formats.node.wire import decode_error
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.server.server import FlightNode
from strandline.node.flight.wire.errors import Code, Unauthenticated, refusal_of
from tests.node.flight.flight_double import Node, until
from tests.node.flight.raw_grpc import RawGrpc, flight_data, message_of


def told(error):
    refusal = refusal_of(error, "The append")
    known = decode_error(dict(refusal.trailers)["grpc-status-details-bin"])
    return refusal.code, type(known), str(known)


def test_an_unexpected_error_is_logged_with_its_trace_and_sent_without(caplog):
    code, kind, sentence = told(RuntimeError("secret"))
    assert caplog.records[0].exc_info is not None
    assert (code, kind) == (Code.UNKNOWN, StorageError)
    assert sentence == "The append failed on the node (RuntimeError): its log says more."


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (NotReady("so"), Code.UNAVAILABLE, NotReady),
        (Overloaded("so"), Code.UNAVAILABLE, Overloaded),
        (CursorExpired("so"), Code.UNKNOWN, CursorExpired),
        (InvalidInput("so"), Code.UNKNOWN, InvalidInput),
        (Fenced("so"), Code.PERMISSION_DENIED, Fenced),
        (Unauthenticated("so"), Code.UNAUTHENTICATED, Fenced),
    ],
)
def test_any_client_can_tell_whether_to_try_again(error, code, kind, caplog):
    assert told(error) == (code, kind, "so")
    assert caplog.records == []


def test_a_caller_that_goes_away_before_its_answer_is_no_error_of_the_node(tmp_path, caplog):
    node = Node(tmp_path / "log")
    with caplog.at_level(logging.WARNING), FlightNode(node) as server:
        with RawGrpc(server.url) as raw:
            raw.send(raw.call("DoPut"), flight_data(message_of(RECORD_SCHEMA)[0], command=b"{}"))
            until(lambda: server.calls)
        until(lambda: not server.calls)
        assert node.log.bounds().next == 0
    assert caplog.records == []
    node.close()


def test_serving_without_the_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    node = Node(tmp_path / "log")
    with pytest.raises(MissingExtra, match=r"strandline\[server\]"):
        FlightNode(node)
    node.close()


def test_nodes_that_are_opened_at_once_in_a_new_process_all_serve():
    """The library was looked up while another thread was importing it, and lacked half of its names."""
    program = """if True:
        import sys, threading
        from strandline.node.flight.server.transport import _grpc
        sys.setswitchinterval(1e-5)
        found = []
        look = lambda: found.append(_grpc().stream_stream_rpc_method_handler)
        threads = [threading.Thread(target=look) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(found))
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "16\n"
    assert ran.stderr == ""
