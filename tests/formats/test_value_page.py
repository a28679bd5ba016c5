"""Pages of values that are made without Arrow: the same bytes, and readable as such."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.formats.arrow import value_page
from strandline.formats.arrow.block import Compression, decode_block, encode_page, frame_pages
from strandline.formats.arrow.value_page import MOST_RECORDS, decode_values, encode_values
from strandline.model.records import Op, record_batch
from tests.matrix_cases import examples


def by_arrow(values, timestamps):
    count = len(values)
    return record_batch(timestamps=timestamps, ops=[Op.PUT] * count, keys=[None] * count, values=values)


@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(-(1 << 62), 1 << 62)), min_size=1, max_size=200))
@settings(max_examples=examples(200), deadline=None)
def test_a_page_has_the_bytes_that_arrow_gives_it(rows):
    values, timestamps = [value for value, _ in rows], [time for _, time in rows]
    assert encode_values(values, timestamps) == by_arrow(values, timestamps).serialize().to_pybytes()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 63, 64, 65, 1000, MOST_RECORDS])
@pytest.mark.parametrize("value", [b"", b"x", b"12345678", b"123456789", bytes(range(256)) * 20])
def test_any_number_of_records_of_any_size_is_as_arrow_has_it(count, value):
    values, timestamps = [value] * count, list(range(count))
    batch = by_arrow(values, timestamps)
    page = encode_values(values, timestamps)
    assert page == batch.serialize().to_pybytes()
    assert decode_values(page).equals(batch)
    block = b"".join(map(bytes, frame_pages([[page]])))
    assert decode_block(memoryview(block), "it", Compression.NONE)[0].equals(batch)
    assert block == b"".join(map(bytes, frame_pages([encode_page(batch, Compression.NONE)])))


def test_what_was_decoded_is_in_the_page_s_own_bytes():
    page = encode_values([b"a" * 1000] * 10, list(range(10)))
    found = decode_values(page).column(3).buffers()[2].address
    start = pa.py_buffer(page).address
    assert start <= found < start + len(page)


def test_a_page_that_arrow_would_describe_in_another_way_is_not_guessed_at(monkeypatch):
    honest = value_page._sample
    monkeypatch.setattr(value_page, "_sample", lambda count, size: honest(count + size % 8, size))
    value_page._template.cache_clear()
    with pytest.raises((AssertionError, ValueError)):
        encode_values([b"a", b"b"], [1, 2])
    value_page._template.cache_clear()
