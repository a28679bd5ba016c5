"""The edits of a manifest of version 1: pure, and each recognises that it was applied."""

from __future__ import annotations

import pytest

from strandline.compat.v1 import edits
from strandline.compat.v1.edits import Moment, QueueListing, checked_path, mark_of, new_location, stored_as, time_of
from strandline.errors import CorruptData, CursorExpired, Diverged, ExpectationFailed, Fenced, InvalidInput
from strandline.log.object.head.edits import StaleUpload
from strandline.model.cursor import Bounds
from strandline.model.head import QueueEntry, QueueManifest
from strandline.testing.clock import ManualClock
from tests.compat.v1.filled_queues import encode_manifest, writer

NOW = Moment(1000.0, 1_700_000_000_000_000)


def listing(number: int, *, by: int = 1, age: float = 0.0, uploaded: int = NOW.wall, expect: int | None = None):
    began = Moment(NOW.monotonic - age, NOW.wall - int(age * 1e6))
    return QueueListing(3, number, (), expect, new_location("ingest", uploaded, writer(by), number), began)


def listed(manifest: QueueManifest, *new: QueueListing, patience: float = 300.0) -> QueueManifest:
    return edits.list_batches(manifest, new, NOW, patience)


def holding(first: int, count: int, epoch: int = 0) -> QueueManifest:
    return QueueManifest(tuple(QueueEntry(first + n, f"x{first + n}") for n in range(count)), first + count, epoch)


# --- listing ---------------------------------------------------------------------------------------------------------


def test_batches_are_listed_in_order_and_numbered_on():
    manifest = listed(holding(5, 1), listing(0), listing(1))
    assert [entry.sequence for entry in manifest.entries] == [5, 6, 7]
    assert manifest.next_sequence == 8
    assert manifest.entries[1].location == listing(0).location


def test_a_listed_batch_is_skipped_and_the_same_manifest_returned():
    manifest = listed(QueueManifest(), listing(0), listing(1))
    assert listed(manifest, listing(0), listing(1)) is manifest
    assert [entry.sequence for entry in listed(manifest, listing(1), listing(2)).entries] == [0, 1, 2]


def test_a_batch_that_was_uploaded_again_is_recognised_by_its_other_name():
    manifest = listed(QueueManifest(), listing(0))
    again = listing(0, uploaded=NOW.wall + 5_000_000)
    assert again.location != manifest.entries[0].location
    assert listed(manifest, again) is manifest


def test_the_same_number_of_another_writer_is_another_batch():
    assert len(listed(QueueManifest(), listing(0), listing(0, by=2)).entries) == 2


def test_once_it_is_acknowledged_a_batch_is_not_recognised_any_more():
    manifest = edits.acknowledge(listed(QueueManifest(), listing(0)), epoch=0, through=0)
    assert [entry.sequence for entry in listed(manifest, listing(0)).entries] == [1]


def test_an_upload_that_began_too_long_ago_is_not_listed():
    assert len(listed(QueueManifest(), listing(0, age=300.0)).entries) == 1
    with pytest.raises(StaleUpload):
        listed(QueueManifest(), listing(0), listing(1, age=300.1))


def test_an_old_upload_that_is_listed_already_is_recognised_before_it_is_refused():
    manifest = listed(QueueManifest(), listing(0))
    assert listed(manifest, listing(0, age=5000.0)) is manifest


@pytest.mark.parametrize(("monotonic", "wall"), [(400.0, 0), (0.0, 400)], ids=["monotonic", "wall"])
def test_time_has_passed_if_it_has_by_either_clock(monotonic, wall):
    # The one may stand still while the machine sleeps, the other may be set back.
    old = QueueListing(1, 0, (), None, "a", Moment(NOW.monotonic - monotonic, NOW.wall - wall * 1_000_000))
    with pytest.raises(StaleUpload):
        listed(QueueManifest(), old)
    back = QueueListing(1, 0, (), None, "a", Moment(NOW.monotonic - 10, NOW.wall + 3_600_000_000))
    assert len(listed(QueueManifest(), back).entries) == 1


def test_an_expected_end_is_checked_unless_the_batch_is_there():
    manifest = listed(holding(5, 2), listing(0, expect=7))
    assert listed(manifest, listing(0, expect=7)) is manifest
    with pytest.raises(ExpectationFailed, match=r"end at 7, and it ends at 8"):
        listed(manifest, listing(1, expect=7))


# --- claiming and acknowledging --------------------------------------------------------------------------------------


def test_a_claim_raises_the_epoch_and_touches_nothing_else():
    assert edits.claim(holding(5, 2, epoch=3)) == holding(5, 2, epoch=4)


def test_a_claim_with_last_acked_drops_what_is_acknowledged():
    assert edits.claim(holding(5, 3), 6) == holding(7, 1, epoch=1)
    assert edits.claim(holding(5, 3), 4) == holding(5, 3, epoch=1)
    assert edits.claim(holding(5, 3), 7) == QueueManifest((), 8, 1)


@pytest.mark.parametrize("manifest", [holding(5, 2), QueueManifest((), 7)], ids=["listed", "empty"])
def test_a_claim_after_which_batches_are_gone_has_expired(manifest):
    with pytest.raises(CursorExpired, match="begins at"):
        edits.claim(manifest, 3)


def test_a_future_last_acked_is_accepted_on_an_empty_queue_only():
    assert edits.claim(QueueManifest((), 7), 100) == QueueManifest((), 7, 1)
    for ahead in (7, 100):
        with pytest.raises(Diverged, match="drop unread batches"):
            edits.claim(holding(5, 2), ahead)


def test_acknowledging_drops_everything_through_a_batch_and_repeating_it_nothing():
    manifest = edits.acknowledge(holding(5, 3, epoch=2), epoch=2, through=6)
    assert manifest == holding(7, 1, epoch=2)
    assert edits.acknowledge(manifest, epoch=2, through=6) is manifest


def test_a_fenced_consumer_acknowledges_nothing_not_even_what_is_gone():
    for through in (2, 6):
        with pytest.raises(Fenced, match=r"epoch 3.*epoch 2 and must stop"):
            edits.acknowledge(holding(5, 3, epoch=3), epoch=2, through=through)


def test_a_batch_that_was_never_listed_cannot_be_acknowledged():
    with pytest.raises(Diverged, match="ends at 8"):
        edits.acknowledge(holding(5, 3), epoch=0, through=8)


def test_a_reset_goes_ahead_but_never_back():
    assert edits.reset(holding(5, 3, epoch=1), 7) == holding(7, 1, epoch=2)
    assert edits.reset(holding(5, 3), 5) == holding(5, 3, epoch=1)
    with pytest.raises(CursorExpired):
        edits.reset(holding(5, 3), 4)
    with pytest.raises(Diverged):
        edits.reset(holding(5, 3), 9)


def test_a_queue_begins_at_its_first_listed_batch_or_where_the_next_will_be():
    assert edits.bounds_of(holding(5, 3)) == Bounds(5, 8)
    assert edits.bounds_of(QueueManifest((), 8)) == Bounds(8, 8)


def test_entries_from_a_sequence_on_are_given_unless_some_are_gone():
    assert [entry.sequence for entry in edits.entries_from(holding(5, 3), 6)] == [6, 7]
    assert edits.entries_from(holding(5, 3), 8) == edits.entries_from(holding(5, 3), 20) == ()
    with pytest.raises(CursorExpired):
        edits.entries_from(holding(5, 3), 4)
    with pytest.raises(CursorExpired):
        edits.entries_from(QueueManifest((), 8), 7)


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_are_ulids_that_sort_by_time_and_contain_it():
    times = [0, 1_000, 1_700_000_000_000_000, 1_700_000_000_001_000, (2**48 - 1) * 1000]
    names = [new_location("ingest", time, writer(1), 0) for time in times]
    assert names == sorted(names)
    assert [time_of(name) for name in names] == times
    assert all(len(name) == len("ingest/") + 26 + len(".batch") for name in names)


def test_a_clock_that_is_out_of_its_mind_still_gives_a_name():
    assert time_of(new_location("ingest", -5, writer(1), 0)) == 0
    assert time_of(new_location("ingest", 2**62, writer(1), 0)) == (2**48 - 1) * 1000


def test_no_two_batches_share_a_mark():
    marks = {mark_of(new_location("ingest", 0, writer(by), number)) for by in range(50) for number in range(50)}
    assert len(marks) == 2500


@pytest.mark.parametrize("name", ["ingest/x.batch", "ingest/8ZZZZZZZZZZZZZZZZZZZZZZZZZ.batch", "ingest/01HX.batch", ""])
def test_a_name_that_is_no_ulid_has_no_time_and_is_its_own_mark(name):
    assert time_of(name) is None
    assert mark_of(name) == name


def test_a_ulid_in_small_letters_is_one_too():
    name = new_location("ingest", 1_700_000_000_000_000, writer(1), 0)
    assert time_of(name.replace("BATCH", "batch").lower()) == 1_700_000_000_000_000


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\0b"])
def test_a_path_that_no_store_could_have_is_refused(path):
    with pytest.raises(InvalidInput, match="data="):
        checked_path(path, "data")


ENCODED = '~%*?#[]{}<>|^`\\"\x01\x1f\x7f\u00e9\u65e5\ud800'


@pytest.mark.parametrize("char", ENCODED)
def test_a_path_that_others_store_percent_encoded_is_refused_with_the_reason(char):
    with pytest.raises(InvalidInput, match=r"percent-encoded.*two queues"):
        checked_path(f"in{char}gest", "data")


def test_every_other_printable_character_is_stored_unescaped():
    plain = "".join(chr(code) for code in range(32, 127) if chr(code) not in ENCODED)
    assert checked_path(plain.replace("/", ""), "data") == stored_as(plain.replace("/", ""))


def test_encoded_names_are_those_of_the_rust_crate():
    # Path::from of object_store: by its tests and documentation.
    assert stored_as("foo bar/I contain illegal chars [") == "foo bar/I contain illegal chars %5B"
    assert stored_as("a%2Fb") == "a%252Fb"
    assert stored_as("\u00e9~*") == "%C3%A9%7E%2A"


@pytest.mark.parametrize("epoch", [2**64 - 1, 2**64 - 2])
def test_no_epoch_follows_the_last_and_the_reserved_one_is_never_written(epoch):
    manifest = QueueManifest(epoch=epoch)
    for edit in (lambda: edits.claim(manifest), lambda: edits.claim(manifest, -1), lambda: edits.reset(manifest, 0)):
        with pytest.raises(CorruptData, match="epoch"):
            edit()
    assert edits.claim(QueueManifest(epoch=2**64 - 3)).epoch == 2**64 - 2


def test_no_sequence_follows_the_last():
    with pytest.raises(CorruptData, match="sequence 9,223,372,036,854,775,807"):
        listed(QueueManifest(next_sequence=2**63 - 1), listing(0))
    assert listed(QueueManifest(next_sequence=2**63 - 2), listing(0)).next_sequence == 2**63 - 1


@pytest.mark.parametrize("manifest", [QueueManifest(epoch=2**64), QueueManifest(next_sequence=2**64)])
def test_a_manifest_that_the_format_cannot_hold_is_our_own_error(manifest):
    with pytest.raises(InvalidInput, match="no room"):
        encode_manifest(manifest)


def test_a_moment_is_taken_from_both_clocks():
    clock = ManualClock()
    before = Moment.of(clock)
    clock.advance(5)
    assert Moment.of(clock).since(before) == 5.0
