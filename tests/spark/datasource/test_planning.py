"""Decisions of the data source, without Spark and without a log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import CursorExpired, Diverged, InvalidInput
from strandline.log.read.planning import FULL_PARTITION, SMALL_PARTITION, pack
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.spark.datasource.planning import (
    cursor_at,
    decode_offset,
    encode_offset,
    narrower,
    resume_point,
)
from strandline.spark.options import parse_options

LOG, OTHER = UUID(int=1), UUID(int=2)
MIB = 1 << 20


@dataclass(frozen=True)
class Piece:
    first: int
    next: int
    size: int

    def fetch(self, columns=None):
        raise AssertionError("packing reads nothing")


def pieces(*sizes: int) -> list[Piece]:
    return [Piece(n, n + 1, size) for n, size in enumerate(sizes)]


# --- packing -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300 * MIB), max_size=80), st.integers(1, 16))
def test_packing_keeps_every_span_once_and_in_order(sizes, cores):
    spans = pieces(*sizes)
    packed = pack(spans, cores)
    assert [span for task in packed for span in task] == spans
    assert all(packed)


@pytest.mark.matrix
@given(st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=400), st.integers(1, 16))
def test_packing_is_balanced_to_within_one_span(sizes, cores):
    packed = pack(pieces(*sizes), cores)
    fair = sum(sizes) / len(packed)
    assert max(sum(span.size for span in task) for task in packed) <= fair + 2 * max(sizes)


def test_little_data_is_one_task_because_a_task_costs_more_than_it_saves():
    assert len(pack(pieces(*[100] * 50), cores=8)) == 1


def test_enough_data_is_one_task_per_core():
    assert len(pack(pieces(*[SMALL_PARTITION] * 8), cores=4)) == 4


def test_much_data_is_tasks_of_a_bounded_size_in_full_rounds():
    packed = pack(pieces(*[16 * MIB] * 100), cores=3)
    assert len(packed) % 3 == 0
    assert max(sum(span.size for span in task) for task in packed) <= FULL_PARTITION + 16 * MIB


def test_a_span_is_never_split_however_large():
    assert [len(task) for task in pack(pieces(900 * MIB), cores=4)] == [1]


def test_no_spans_are_no_tasks():
    assert pack([], cores=4) == []


def test_spans_of_no_size_are_still_packed():
    assert [len(task) for task in pack(pieces(0, 0), cores=4)] == [2]


# --- options -----------------------------------------------------------------------------------------------------


def options(**given: str):
    return parse_options({"path": "s3://bucket/log", **given})


@pytest.mark.parametrize(
    ("text", "position"),
    [
        *[("earliest", "retained"), ("retained", "retained"), ("Beginning", 0), ("Latest", "now"), (" 17 ", 17)],
        (str(Cursor(LOG, 5)), Cursor(LOG, 5)),
    ],
)
def test_a_position_is_an_end_an_offset_or_a_cursor(text, position):
    assert options(startingOffset=text).start == position
    assert options(endingOffset=text).end == position


@pytest.mark.parametrize(
    "wrong",
    [
        {"startOffset": "1"},
        {"maxOffsetsPerTrigger": "5"},
        *[
            {name: value}
            for name in (
                "startingOffset",
                "endingOffset",
                "maxRecordsPerTrigger",
                "partitions",
                "failOnDataLoss",
                "hold",
            )
            for value in ("-1", "x", str(2**63), "NaN", "", "1e3", "\x1b[31m\n", "5/5")
        ],
        *[{name: "0"} for name in ("maxRecordsPerTrigger", "maxBytesPerTrigger", "maxBatchesPerTrigger", "hold")],
        {"maxBytesPerTrigger": "10MB"},
        {"logFormat": "\x1b[31m\n"},
    ],
)
def test_a_wrong_option_is_named_in_one_sentence(wrong):
    with pytest.raises(InvalidInput) as caught:
        options(**wrong)
    said = str(caught.value)
    assert next(iter(wrong)).lower() in said.lower()
    assert said.isprintable(), "nothing of it moves a terminal's cursor"


def test_options_are_read_whatever_their_case_and_storage_ones_are_passed_on():
    read = options(MAXRECORDSPERTRIGGER="5", failondataloss="FALSE", **{"storage.aws_region": "eu"})
    assert read.limit == Limit(records=5)
    assert not read.fail_on_data_loss
    assert read.storage == {"aws_region": "eu"}


def test_a_log_in_memory_is_refused_because_spark_reads_elsewhere():
    with pytest.raises(InvalidInput, match="other"):
        parse_options({"path": "memory://x"})


def test_an_address_is_needed():
    with pytest.raises(InvalidInput, match="address"):
        parse_options({})


# --- positions ---------------------------------------------------------------------------------------------------


def test_ends_resolve_to_what_the_log_holds():
    log = SimpleNamespace(log_id=LOG)
    assert cursor_at("retained", log, Bounds(3, 9)).next == 3
    assert cursor_at("now", log, Bounds(3, 9)).next == 9
    assert cursor_at(7, log, Bounds(3, 9)) == Cursor(LOG, 7)


def test_a_cursor_of_another_log_is_refused():
    with pytest.raises(Diverged):
        cursor_at(Cursor(OTHER, 7), SimpleNamespace(log_id=LOG), Bounds(3, 9))


def test_an_expired_cursor_is_refused_with_what_to_do():
    with pytest.raises(CursorExpired, match=r"Offsets 1 to 4 .*failOnDataLoss=false"):
        resume_point(Cursor(LOG, 1), LOG, Bounds(5, 9), fail_on_data_loss=True)


def test_an_accepted_loss_goes_on_at_the_first_retained_offset_and_is_counted():
    cursor, skipped = resume_point(Cursor(LOG, 1), LOG, Bounds(5, 9), fail_on_data_loss=False)
    assert (cursor.next, skipped) == (5, 4)


def test_a_cursor_past_the_end_is_refused_even_if_losses_are_accepted():
    with pytest.raises(Diverged):
        resume_point(Cursor(LOG, 10), LOG, Bounds(5, 9), fail_on_data_loss=False)


def test_the_narrower_limit_is_within_both():
    assert narrower(Limit(records=5, bytes=9), Limit(records=7, upto=3)) == Limit(records=5, bytes=9, upto=3)


# --- offsets and checkpoints ---------------------------------------------------------------------------------------


@given(st.integers(0, 2**62), st.integers(0, 2**31), st.none() | st.integers(0, 2**64 - 1))
def test_offsets_survive_json_and_their_text_is_always_the_same(offset, term, fingerprint):
    cursor = Cursor(LOG, offset, term, fingerprint)
    text = json.dumps(encode_offset(cursor))
    again = decode_offset(json.loads(text))
    assert (again, again.fingerprint) == (cursor, fingerprint)
    assert json.dumps(encode_offset(again)) == text
    assert list(json.loads(text)) == ["log", "next", "term", "fingerprint"][: 3 if fingerprint is None else 4]


@pytest.mark.parametrize(
    "foreign",
    [
        {},
        {"partition": 3},
        {"log": "x", "next": 1},
        {"log": str(LOG), "next": -1},
        {"log": str(LOG), "next": 1, "fingerprint": 7},
    ],
)
def test_offsets_of_another_source_are_refused(foreign):
    with pytest.raises(InvalidInput):
        decode_offset(foreign)
