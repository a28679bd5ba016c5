"""Errors that leave a node: what they are called by then, and what the node's log says of them."""

import logging

import pyarrow.flight as fl
import pytest

from strandline.node.flight.failures import answering, arrived


def test_a_caller_that_goes_away_before_its_answer_is_no_error_of_the_node(caplog):
    with caplog.at_level(logging.INFO), pytest.raises(fl.FlightUnavailableError), answering("The append"):
        raise OSError("Unknown error writing metadata.")
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert "the caller has gone" in record.message


def test_an_unexpected_error_is_logged_with_its_trace_and_told_without(caplog):
    with pytest.raises(fl.FlightServerError) as raised, answering("The append"):
        raise RuntimeError("secret")
    assert caplog.records[0].exc_info is not None
    told = str(arrived(raised.value, "grpc://x", "an append"))
    assert told == "The append failed on the node (RuntimeError): its log says more."
