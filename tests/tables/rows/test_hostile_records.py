"""Records that a client may append and a table cannot store: a letter each, and no follower stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import strandline as sl
from strandline.model import records as model_records
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, record_batch
from tests.contracts.logs.batches import headers_named
from tests.matrix_cases import some
from tests.tables.maintain.test_replay_formats import Place, place  # noqa: F401 - a fixture

WORST = 2**63
TIMES = [
    -WORST,
    1 - WORST,
    WORST - 1,
    *(
        edge + by
        for edge in (
            -1_096_193_779_200_000_000,
            971_890_963_200_000_000,
            -62_167_219_200_000_000,
            253_402_300_800_000_000,
            -210_866_803_200_000_000,
        )
        for by in (-1, 0)
    ),
    0,
]
KEYS = [b"k", b"", None, b"\0", b"\xff\xfe", b"x" * 10_000]
VALUES = [
    b'{"id": 1}',
    None,
    b"",
    b"\xff",
    b'{"id": 1, "s": "\\u0000"}',
    b'{"id": 1, "s": "\\ud800"}',
    b'{"id": 300}',
    b'{"id": 1, "s": "' + b"y" * 100_000 + b'"}',
    b'{"id": 1, "at": "0001-01-01T00:00:00Z"}',
    b"null",
    b"[" * 9_000,
]
HEADERS = [None, [], [("\0", b"\xff"), ("\0", None), ("", b""), ("\U0010ffff", b"\0")]]
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(TIMES) | st.integers(-WORST, WORST - 1),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.sampled_from(KEYS),
        st.sampled_from(VALUES),
        st.sampled_from(HEADERS),
    ),
    min_size=1,
    max_size=8,
)
EACH = [
    *[(time, 0, b"k", value, None) for time in TIMES for value in (VALUES[0], b"bad")],
    *[(1, op, key, None, None) for op in (1, 2) for key in KEYS],
    *[(1, 0, key, VALUES[0], None) for key in KEYS],
    *[(1, 0, b"v", value, headers) for value in VALUES for headers in HEADERS],
]
CODEC = sl.values.Json(pa.schema({"id": pa.int8(), "s": pa.string(), "at": pa.timestamp("us", "UTC")}))


def appended(records: list[tuple[Any, ...]]) -> Any:
    log = sl.log.MemoryLog()
    times, ops, keys, values, headers = zip(*records, strict=True)
    batch = record_batch(timestamps=times, ops=ops, keys=keys, values=values, headers=headers)
    log.append(batch, writer=WriterId(uuid4()), number=0).result(60)
    return log


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["append", "latest"], 1))
@pytest.mark.parametrize("codec", some([CODEC, None], 1), ids=lambda codec: "bytes" if codec is None else "json")
def test_no_record_stops_a_follower_with_dead_letters_and_each_letter_is_the_record(
    place: Place,  # noqa: F811
    codec: Any,
    mode: str,
) -> None:
    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
    @given(records=RECORDS)
    @example(records=EACH)
    def follow_and_compare(records: list[tuple[Any, ...]]) -> None:
        place.begin()
        place.log, place.options = appended(records), {"mode": mode}
        assert sl.follow(place.log, place.sink(codec), upto="end").next == len(records)
        letters = sl.tables.letters(place.sink(codec), place.log)
        stored = pa.Table.from_batches(place.log.read(), READ_SCHEMA).take(letters["offset"])
        assert letters.select(READ_SCHEMA.names).equals(stored)
        found = sl.tables.verify(place.sink(codec), place.log)
        assert found.is_clean, found.first
        if mode == "append":
            assert found.rows + letters.num_rows == len(records)
        assert place.replay(codec).applied == 0
        assert sl.tables.rebuild(place.sink(codec), place.log).next == len(records)

    follow_and_compare()


@pytest.mark.parametrize("kind", ["wal", "file"])
def test_header_names_that_are_no_text_and_were_stored_before_stop_no_reader_and_no_follower(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{kind}://{tmp_path}/log"
    with monkeypatch.context() as patch, sl.open(address, create=True) as earlier:
        patch.setattr(model_records, "check_header_names", lambda _: None)
        batch = pa.table({"value": [b'{"id": 1}'], "headers": headers_named(b"ok", b"\xffx")})
        for number, rows in enumerate((batch, batch.set_column(0, "value", [[b"bad"]]))):
            earlier.append(rows, writer=WriterId(UUID(int=1)), number=number).result(60)
    log = sl.open(address)
    (read,) = {str(found) for one in log.read() for found in one["headers"].to_pylist()}
    assert read == str([("ok", b"1"), ("\\xffx", b"1")])
    for codec in (None, CODEC):
        sink = sl.SqliteSink(tmp_path / f"{codec is None}.db", table="t", value=codec, mode="append", dead_letters=True)
        assert sl.follow(log, sink, upto="end").next == 2
        assert sl.tables.letters(sink, log).num_rows == (codec is not None)
        assert sl.tables.verify(sink, log).is_clean
        assert sl.tables.replay_letters(sink, log).unreadable == (codec is not None)
