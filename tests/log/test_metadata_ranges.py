"""Metadata ranges in columns equal the tuple of the same ranges."""

from __future__ import annotations

import json
import pickle

from strandline.log.queue.contract import encode_letter
from strandline.model.head import MetadataRange, MetadataRanges, QueueEntry

PLAIN = (MetadataRange(0, 5, b"a"), MetadataRange(2, 2**70, b""), MetadataRange(3, -1, b"c"))
RANGES = MetadataRanges.of(PLAIN)


def test_metadata_ranges_equal_a_tuple_from_both_sides_and_hash_alike():
    assert RANGES == PLAIN
    assert PLAIN == RANGES
    assert QueueEntry(0, "x", PLAIN) == QueueEntry(0, "x", RANGES)
    assert {QueueEntry(0, "x", PLAIN)} == {QueueEntry(0, "x", RANGES)}
    assert PLAIN[:2] != RANGES
    assert list(PLAIN) != RANGES
    assert MetadataRanges() == ()


def test_metadata_ranges_are_indexed_sliced_searched_and_shown_as_a_tuple():
    assert (RANGES[-1], len(RANGES), RANGES[1:], bool(MetadataRanges())) == (PLAIN[-1], 3, PLAIN[1:], False)
    assert list(reversed(RANGES)) == list(reversed(PLAIN))
    assert PLAIN[1] in RANGES
    assert repr(RANGES) == repr(PLAIN)
    assert pickle.loads(pickle.dumps(RANGES)) == PLAIN


def test_parts_are_joined_in_order_and_moved_after_other_records():
    assert MetadataRanges.joined([]) == ()
    assert MetadataRanges.joined([RANGES, RANGES.shifted(4)])[3:] == tuple(
        item._replace(start=item.start + 4) for item in PLAIN
    )


def test_a_dead_letter_holds_each_range():
    letter = json.loads(encode_letter(QueueEntry(7, "x", RANGES), reason="torn", now=1, kept=None))
    assert letter["descriptor"]["metadata"][0] == {"start": 0, "ingested": 5, "payload": "YQ=="}
    assert len(letter["descriptor"]["metadata"]) == 3
