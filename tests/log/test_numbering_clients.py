"""Clients that number their appends by themselves: one append of a number, whichever server appends for them."""

from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import OutOfOrder, WriterExpired
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.log.writers.source import advancing, client_writer
from strandline.model.head import SourceProof, WriterId, proven

CLIENT = client_writer("web-1")


def batch(value: str):
    return pa.table({"value": [value.encode()]})


def append(log, value, number, epoch, sequence):
    writer = proven(advancing(CLIENT, 1), SourceProof(sequence, 0, epoch))
    return log.append(batch(value), writer=writer, number=number).result()


@pytest.fixture(params=["memory", "file", "wal"])
def place(request, tmp_path):
    return {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/log", "wal": f"wal://{tmp_path}/log"}[
        request.param
    ]


def values(log):
    return [value for part in log.read("beginning") for value in part.column("value").to_pylist()]


def test_the_same_append_again_is_a_repetition_also_after_a_restart(place):
    with sl.open(place, create=True) as log:
        assert append(log, "a", 0, 3, 0).first == 0
        assert append(log, "b", 1, 3, 1).first == 1
        assert append(log, "b", 1, 3, 1).first == 1
    with sl.open(place) as log:
        assert append(log, "b", 1, 3, 1).first == 1
        last = log.last_append(CLIENT)
        assert (last.number, last.proof) == (2, SourceProof(1, 0, 3))
        assert values(log) == [b"a", b"b"]


def test_another_append_with_a_number_that_was_taken_is_refused_and_not_taken_for_a_repetition(place):
    with sl.open(place, create=True) as log:
        append(log, "new epoch", 0, 1, 0)
        with pytest.raises(OutOfOrder):
            append(log, "old epoch", 0, 0, 0)
        append(log, "more", 1, 1, 1)
        with pytest.raises(OutOfOrder):
            append(log, "new epoch", 0, 1, 0)
        assert values(log) == [b"new epoch", b"more"]


def test_clients_are_not_counted_as_ingested_sources():
    with sl.open("memory://numbering-clients", create=True) as log:
        for number in range(300):  # more than a log remembers sources
            writer = proven(advancing(client_writer(f"tab-{number}"), 1), SourceProof(0, 0, 0))
            log.append(batch("x"), writer=writer, number=0)
        log.append(batch("last"), writer=WriterId(UUID(int=7)), number=0).result()
        assert log.last_append(client_writer("tab-299")) is not None
    assert MAX_WRITERS > 300


def test_an_append_of_a_client_that_the_log_does_not_know_any_more_is_refused(place):
    with sl.open(place, create=True) as log:
        with pytest.raises(WriterExpired, match="its last append is unknown"):
            append(log, "b", 1, 3, 1)
        append(log, "c", 0, 4, 0)
        assert values(log) == [b"c"]


def test_a_client_that_was_forgotten_before_its_lost_answer_was_asked_for_again_appends_nothing_twice():
    with sl.open("memory://numbering-forgotten-client", create=True) as log:
        append(log, "a", 0, 3, 0)
        append(log, "b", 1, 3, 1)  # its answer is lost
        for number in range(MAX_WRITERS):
            log.append(batch("x"), writer=WriterId(UUID(int=number + 1)), number=0)
        with pytest.raises(WriterExpired):
            append(log, "b", 1, 3, 1)
        assert values(log).count(b"b") == 1
