"""The follower engine of a watch, step by step: order, priority, a store that fails, and a resync."""

from __future__ import annotations

import pytest

from strandline.errors import InvalidInput
from strandline.followers.engine import STORE_RETRIES, Engine, Phase
from strandline.followers.events import (
    Action,
    AppliedRange,
    Apply,
    Batching,
    Began,
    BeginResync,
    EndResync,
    Event,
    Expired,
    Export,
    FindVanishedKeys,
    Finish,
    GiveUp,
    Open,
    Pause,
    Receive,
    Received,
    ReportCursor,
    ResyncWrite,
    Signal,
    StoreBatch,
    VanishedKeys,
)
from strandline.kv.contract import Ended, Listed
from strandline.model.keyed import Updates
from tests.followers.scripted_watch import at, given, numbered, put

FIVE, SIX, SEVEN = (numbered(version, 1) for version in (5, 6, 7))
GONE, SWEPT = Updates.removals([b"gone"]), Updates.removals([b"swept"])
LONG = 1000.0


def received(chunk: Updates) -> Received:
    assert chunk.upto is not None
    return Received(chunk, len(chunk), chunk.upto)


def watching(*, records: int = 3, window: float = LONG) -> Engine:
    """An engine that follows from offset 5 on."""
    engine = Engine(Batching(records=records, window=window), can_resync=True)
    assert engine.step(Began(at(5)), 0.0) == Open(at(5))
    assert isinstance(engine.step(Signal.OPENED, 0.0), Receive)
    return engine


def resyncing(*, records: int = 3, window: float = LONG) -> Engine:
    """An engine in a resync: the keys are compared, the store is flagged, and the full watch is open."""
    engine = Engine(Batching(records=records, window=window), can_resync=True)
    assert engine.step(Began(at(5)), 0.0) == Open(at(5))
    assert engine.step(Expired(), 0.0) == FindVanishedKeys()
    assert engine.step(VanishedKeys([]), 0.0) == StoreBatch(BeginResync())
    assert engine.step(Signal.STORED, 0.0) == Open(None)
    assert isinstance(engine.step(Signal.OPENED, 0.0), Receive)
    return engine


def drive(engine: Engine, *events: Event, now: float = 0.0) -> Action:
    for event in events:
        action = engine.step(event, now)
    return action


def failing(engine: Engine, chunk: Updates, now: float = 0.0) -> Action:
    """Flush a chunk by its window, and let the write to the store fail."""
    engine.step(received(chunk), now)
    assert engine.step(Signal.NOTHING, now + LONG) == Apply([chunk])
    assert isinstance(engine.step(Signal.APPLIED, now + LONG), StoreBatch)
    return engine.step(Signal.STORE_FAILED, now + LONG)


# --- order -----------------------------------------------------------------------------------------------------


def test_a_watch_applies_then_stores_then_moves_the_cursor_then_reports():
    engine = watching(records=1)
    assert engine.step(received(FIVE), 0.0) == Apply([FIVE])
    assert engine.applied == at(5)
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(AppliedRange([FIVE], at(5), at(6)))
    assert engine.applied == at(5)
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(at(6))
    assert engine.applied == at(6)


def test_each_cursor_is_reported_once():
    engine = watching(records=1)
    assert drive(engine, received(FIVE), Signal.APPLIED, Signal.STORED) == ReportCursor(at(6))
    assert isinstance(engine.step(Signal.NOTHING, 0.0), Receive)
    assert isinstance(engine.step(Signal.NOTHING, 5.0), Receive)


def test_a_batch_whose_versions_are_all_unknown_is_applied_and_moves_no_cursor():
    engine = watching(records=1)
    unknown = given(put(None, b"a"), since=5)
    assert engine.step(received(unknown), 0.0) == Apply([unknown])
    assert isinstance(engine.step(Signal.APPLIED, 0.0), Receive)
    assert engine.applied == at(5)


def test_updates_of_unknown_versions_are_stored_with_the_next_that_moves_the_cursor():
    engine = watching(records=1)
    unknown = given(put(None, b"a"), since=5)
    drive(engine, received(unknown), Signal.APPLIED)
    assert drive(engine, received(FIVE), Signal.APPLIED) == StoreBatch(AppliedRange([unknown, FIVE], at(5), at(6)))


def test_updates_of_unknown_versions_alone_are_no_doubt_at_the_end():
    engine = watching(records=1)
    drive(engine, received(given(put(None, b"a"), since=5)), Signal.APPLIED)
    engine.stop()
    assert engine.step(Signal.NOTHING, 0.0) == Finish(at(5), doubtful=False)


def test_nothing_can_be_applied_twice_or_out_of_turn():
    with pytest.raises(InvalidInput, match="Nothing was being applied"):
        watching().step(Signal.APPLIED, 0.0)


# --- when it flushes -------------------------------------------------------------------------------------------


def test_a_full_batch_is_flushed_at_once():
    engine = watching(records=3)
    assert isinstance(engine.step(received(FIVE), 0.0), Receive)
    two = numbered(6, 2)
    assert engine.step(received(two), 0.0) == Apply([FIVE, two])


def test_the_window_counts_from_the_first_update_of_the_batch_and_is_no_longer_for_the_later_ones():
    engine = watching(window=1.0)
    engine.step(received(FIVE), 10.0)
    assert isinstance(engine.step(received(SIX), 10.9), Receive)
    assert engine.step(Signal.NOTHING, 11.0) == Apply([FIVE, SIX])
    drive(engine, Signal.APPLIED, Signal.STORED, Signal.NOTHING, now=11.0)
    engine.step(received(SEVEN), 20.0)
    assert isinstance(engine.step(Signal.NOTHING, 20.9), Receive)
    assert engine.step(Signal.NOTHING, 21.0) == Apply([SEVEN])


def test_a_watch_never_waits_beyond_the_window():
    engine = watching(window=0.5)
    take = engine.step(received(FIVE), 10.0)
    assert isinstance(take, Receive)
    assert take.seconds == 0.5


@pytest.mark.parametrize("end", [Signal.NOTHING, Ended(), Signal.STREAM_FAILED])
def test_a_stop_and_the_end_and_an_error_of_the_stream_flush(end):
    engine = watching()
    engine.step(received(FIVE), 0.0)
    if end == Signal.NOTHING:
        engine.stop()
    assert engine.step(end, 0.0) == Apply([FIVE])
    assert drive(engine, Signal.APPLIED, Signal.STORED) == ReportCursor(at(6))
    assert engine.step(Signal.NOTHING, 0.0) == Finish(at(6))


def test_an_export_flushes_first():
    engine = watching()
    engine.step(received(FIVE), 0.0)
    engine.ask("me")
    assert engine.step(Signal.NOTHING, 0.0) == Apply([FIVE])
    assert drive(engine, Signal.APPLIED, Signal.STORED) == ReportCursor(at(6))
    assert engine.step(Signal.NOTHING, 0.0) == Export("me")


def test_the_end_of_a_full_watch_moves_the_cursor_within_the_window_even_if_nothing_more_comes():
    engine = Engine(Batching(records=1, window=1.0))
    engine.step(Began(None), 0.0)
    engine.step(Signal.OPENED, 0.0)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORED, Signal.NOTHING)
    engine.step(Listed(at(9)), 0.0)
    assert engine.step(Signal.NOTHING, 1.0) == Apply([])
    assert engine.step(Signal.APPLIED, 1.0) == StoreBatch(AppliedRange([], at(6), at(9)))
    assert engine.step(Signal.STORED, 1.0) == ReportCursor(at(9))


def test_a_full_watch_that_gave_nothing_has_nothing_to_say():
    engine = Engine(Batching(window=0.0))
    engine.step(Began(None), 0.0)
    engine.step(Signal.OPENED, 0.0)
    assert isinstance(engine.step(Listed(at(9)), 0.0), Receive)
    assert isinstance(engine.step(Signal.NOTHING, 5.0), Receive)
    engine.stop()
    assert engine.step(Signal.NOTHING, 6.0) == Finish(None)


# --- a store that fails ----------------------------------------------------------------------------------------


def test_a_failed_batch_is_neither_reported_nor_applied_again_but_stored_after_a_pause():
    engine = watching()
    take = failing(engine, FIVE)
    assert isinstance(take, Receive)
    assert take.seconds == pytest.approx(STORE_RETRIES.pause(0, 1.0))
    assert isinstance(engine.step(Signal.NOTHING, LONG + 0.019), Receive)
    assert engine.step(Signal.NOTHING, LONG + 0.021) == StoreBatch(AppliedRange([FIVE], at(5), at(6)))
    assert engine.applied == at(5)
    assert engine.step(Signal.STORED, LONG + 1) == ReportCursor(at(6))


def test_the_pauses_between_failures_grow():
    engine = watching()
    now, pauses = LONG, []
    action = failing(engine, FIVE)
    for _ in range(8):
        assert isinstance(action, Receive)
        assert engine._retry is not None
        pauses.append(engine._retry - now)
        now = engine._retry
        assert isinstance(engine.step(Signal.NOTHING, now), StoreBatch)
        action = engine.step(Signal.STORE_FAILED, now)
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0])


def test_a_batch_after_a_failed_one_is_applied_and_goes_to_the_store_after_it():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORE_FAILED)
    assert engine.step(received(SIX), 0.0) == Apply([SIX])
    assert isinstance(engine.step(Signal.APPLIED, 0.0), Receive)  # its time has not come: the pause is not over
    assert engine.step(Signal.NOTHING, 1.0) == StoreBatch(AppliedRange([FIVE, SIX], at(5), at(7)))
    assert engine.step(Signal.STORED, 1.0) == ReportCursor(at(7))


def test_a_failing_store_lets_only_so_much_be_applied_ahead_of_it():
    engine = watching(records=1)
    action = drive(engine, received(FIVE), Signal.APPLIED, Signal.STORE_FAILED)
    applied = 1
    while isinstance(action, Receive):
        assert engine.step(received(numbered(5 + applied, 1)), 0.0) == Apply([numbered(5 + applied, 1)])
        action = engine.step(Signal.APPLIED, 0.0)
        applied += 1
    assert isinstance(action, Pause)
    assert applied == STORE_RETRIES.attempts
    assert isinstance(engine.step(Signal.NOTHING, 1.0), StoreBatch)
    assert engine.step(Signal.STORED, 1.0) == ReportCursor(at(5 + applied))
    assert isinstance(engine.step(Signal.NOTHING, 1.0), Receive)


def fail(engine: Engine, times: int, now: float) -> Action:
    """``times`` failures in a row."""
    action = engine.step(Signal.STORE_FAILED, now)
    for _ in range(times - 1):
        assert engine._retry is not None
        now = engine._retry
        assert isinstance(engine.step(Signal.NOTHING, now), StoreBatch)
        action = engine.step(Signal.STORE_FAILED, now)
    return action


def test_sixteen_failures_in_a_row_end_it():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED)
    assert fail(engine, 16, 0.0) == GiveUp(16)


def test_fifteen_failures_and_a_success_restart_the_count():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED)
    for version in (6, 7):
        assert isinstance(fail(engine, 15, 0.0), Receive)
        assert isinstance(engine.step(Signal.NOTHING, LONG), StoreBatch)
        assert engine.step(Signal.STORED, LONG) == ReportCursor(at(version))
        drive(engine, Signal.NOTHING, received(numbered(version, 1)), Signal.APPLIED, now=LONG)


def test_at_stop_a_failing_store_is_tried_once_more_without_a_pause_and_then_the_end_is_doubtful():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORE_FAILED)
    engine.stop()
    assert engine.step(Signal.NOTHING, 0.0) == StoreBatch(AppliedRange([FIVE], at(5), at(6)))
    assert engine.step(Signal.STORE_FAILED, 0.0) == Finish(at(5), doubtful=True)


def test_at_stop_a_store_that_works_again_is_no_doubt():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORE_FAILED)
    engine.stop()
    assert drive(engine, Signal.NOTHING, Signal.STORED) == ReportCursor(at(6))
    assert engine.step(Signal.NOTHING, 0.0) == Finish(at(6), doubtful=False)


def test_an_error_of_the_stream_within_a_resync_flushes_and_leaves_the_flag():
    engine = resyncing()
    engine.step(received(FIVE), 0.0)
    assert engine.step(Signal.STREAM_FAILED, 0.0) == Apply([FIVE])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(ResyncWrite([FIVE]))
    assert engine.step(Signal.STORED, 0.0) == Finish(at(5))


def test_the_sixteenth_failure_at_stop_ends_in_good_order():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED)
    fail(engine, 15, 0.0)
    engine.stop()
    assert isinstance(engine.step(Signal.NOTHING, 0.0), StoreBatch)
    assert engine.step(Signal.STORE_FAILED, 0.0) == Finish(at(5), doubtful=True)


def test_at_the_end_of_the_stream_a_failing_store_is_tried_again_with_pauses():
    engine = watching()
    engine.step(received(FIVE), 0.0)
    drive(engine, Ended(), Signal.APPLIED)
    pause = engine.step(Signal.STORE_FAILED, 0.0)
    assert isinstance(pause, Pause)
    assert pause.seconds == STORE_RETRIES.pause(0, 1.0)
    assert engine.step(Signal.NOTHING, pause.seconds) == StoreBatch(AppliedRange([FIVE], at(5), at(6)))
    assert engine.step(Signal.STORED, 1.0) == ReportCursor(at(6))
    assert engine.step(Signal.NOTHING, 1.0) == Finish(at(6))


def test_at_the_end_of_the_stream_sixteen_failures_are_still_an_error():
    engine = watching()
    engine.step(received(FIVE), 0.0)
    drive(engine, Ended(), Signal.APPLIED)
    assert fail(engine, 16, 0.0) == GiveUp(16)


def test_a_stop_while_it_waits_for_a_store_at_the_end_of_the_stream_takes_effect():
    engine = watching()
    engine.step(received(FIVE), 0.0)
    drive(engine, Ended(), Signal.APPLIED, Signal.STORE_FAILED)
    engine.stop()
    assert isinstance(engine.step(Signal.NOTHING, 0.0), StoreBatch)
    assert engine.step(Signal.STORE_FAILED, 0.0) == Finish(at(5), doubtful=True)


# --- stop, window, resync, export, receive ---------------------------------------------------------------------


def test_a_stop_goes_before_an_export_and_before_receiving():
    engine = watching()
    engine.ask("me")
    engine.stop()
    assert engine.step(Signal.NOTHING, 0.0) == Finish(at(5))


def test_a_stop_before_it_opened_anything_opens_nothing():
    engine = Engine(Batching())
    engine.stop()
    assert engine.step(Began(at(5)), 0.0) == Finish(at(5))


def test_a_stop_goes_before_what_a_resync_still_has_to_do():
    engine = Engine(Batching(), can_resync=True)
    drive(engine, Began(at(5)), Expired())
    engine.stop()
    assert engine.step(VanishedKeys([GONE]), 0.0) == Finish(at(5))


def test_a_window_goes_before_an_export():
    engine = watching(window=1.0)
    engine.step(received(FIVE), 0.0)
    engine.ask("me")
    assert engine.step(Signal.NOTHING, 1.0) == Apply([FIVE])


def test_an_export_goes_before_receiving():
    engine = watching()
    engine.ask("me")
    assert engine.step(Signal.NOTHING, 0.0) == Export("me")


def test_an_export_waits_until_a_failing_store_has_taken_what_was_applied():
    engine = watching(records=1)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORE_FAILED)
    engine.ask("me")
    assert isinstance(engine.step(Signal.NOTHING, 0.0), Receive)
    assert isinstance(engine.step(Signal.NOTHING, 1.0), StoreBatch)
    assert engine.step(Signal.STORED, 1.0) == ReportCursor(at(6))
    assert engine.step(Signal.NOTHING, 1.0) == Export("me")


def test_an_export_that_was_asked_during_a_resync_waits_for_its_end():
    engine = resyncing()
    engine.ask("me")
    assert isinstance(engine.step(received(FIVE), 0.0), Receive)  # it does not even flush for it
    assert engine.step(Listed(at(9)), 0.0) == Apply([FIVE])
    assert isinstance(drive(engine, Signal.APPLIED, Signal.STORED), FindVanishedKeys)
    assert engine.step(VanishedKeys([]), 0.0) == StoreBatch(EndResync(at(9)))
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(at(9))
    assert engine.step(Signal.NOTHING, 0.0) == Export("me")


def test_a_flood_of_updates_starves_neither_window_nor_export_nor_stop():
    engine = watching(records=1_000_000, window=1.0)
    version, now = 5, 0.0

    def flood_until(kind: type[Action]) -> int:
        nonlocal version, now
        for step in range(100):
            now += 0.25
            action = engine.step(received(numbered(version, 1)), now)
            version += 1
            if isinstance(action, Apply):
                action = drive(engine, Signal.APPLIED, Signal.STORED, Signal.NOTHING, now=now)
                if kind is Apply:
                    return step
            if isinstance(action, kind):
                return step
            if isinstance(action, Export):
                engine.step(Signal.NOTHING, now)
        raise AssertionError(f"{kind} never came")

    assert flood_until(Apply) <= 5
    engine.ask("me")
    assert flood_until(Export) == 0
    engine.stop()
    assert flood_until(Finish) == 0


def test_a_flood_of_exports_does_not_starve_receiving():
    engine = watching()
    engine.ask("first")
    engine.ask("second")
    assert engine.step(Signal.NOTHING, 0.0) == Export("first")
    take = engine.step(Signal.NOTHING, 0.0)
    assert isinstance(take, Receive)
    assert take.seconds == 0.0
    assert engine.step(Signal.NOTHING, 0.0) == Export("second")
    take = engine.step(Signal.NOTHING, 0.0)
    assert isinstance(take, Receive)
    assert take.seconds > 0.0


def test_a_resync_goes_before_an_export_and_before_receiving():
    engine = resyncing(records=1)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORED)
    engine.ask("me")
    assert engine.step(Listed(at(9)), 0.0) == FindVanishedKeys(frozenset({b"k5"}))


# --- resync ----------------------------------------------------------------------------------------------------


def test_after_an_expired_cursor_it_compares_then_flags_then_removes_and_only_then_takes_everything_again():
    engine = Engine(Batching(), can_resync=True)
    assert engine.step(Began(at(5)), 0.0) == Open(at(5))
    assert engine.step(Expired(), 0.0) == FindVanishedKeys()
    assert engine.step(VanishedKeys([GONE, SWEPT]), 0.0) == StoreBatch(BeginResync())
    assert engine.step(Signal.STORED, 0.0) == Apply([GONE])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(ResyncWrite([GONE]))
    assert engine.step(Signal.STORED, 0.0) == Apply([SWEPT])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(ResyncWrite([SWEPT]))
    assert engine.step(Signal.STORED, 0.0) == Open(None)
    assert engine.applied == at(5)


def test_a_store_that_does_not_take_the_flag_is_waited_for():
    engine = Engine(Batching(), can_resync=True)
    drive(engine, Began(at(5)), Expired(), VanishedKeys([GONE]))
    assert isinstance(engine.step(Signal.STORE_FAILED, 0.0), Pause)
    assert engine.step(Signal.NOTHING, 1.0) == StoreBatch(BeginResync())
    assert engine.step(Signal.STORED, 1.0) == Apply([GONE])


def test_the_full_watch_is_not_opened_before_the_store_has_taken_the_removals():
    engine = Engine(Batching(), can_resync=True)
    drive(engine, Began(at(5)), Expired(), VanishedKeys([GONE]), Signal.STORED, Signal.APPLIED)
    assert isinstance(engine.step(Signal.STORE_FAILED, 0.0), Pause)
    assert engine.step(Signal.NOTHING, 1.0) == StoreBatch(ResyncWrite([GONE]))
    assert engine.step(Signal.STORED, 1.0) == Open(None)


def test_a_new_listing_moves_no_cursor_before_it_is_complete():
    engine = resyncing(records=1)
    assert engine.step(received(FIVE), 0.0) == Apply([FIVE])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(ResyncWrite([FIVE]))
    assert isinstance(engine.step(Signal.STORED, 0.0), Receive)
    assert engine.applied == at(5)


def test_the_sweep_goes_by_all_that_was_given_and_its_removals_come_before_the_end():
    engine = resyncing(records=2)
    drive(engine, received(FIVE), received(SIX), Signal.APPLIED, Signal.STORED, received(SEVEN))
    assert engine.step(Listed(at(9)), 0.0) == Apply([SEVEN])
    assert drive(engine, Signal.APPLIED, Signal.STORED) == FindVanishedKeys(frozenset({b"k5", b"k6", b"k7"}))
    assert engine.step(VanishedKeys([SWEPT]), 0.0) == Apply([SWEPT])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(ResyncWrite([SWEPT]))
    assert engine.applied == at(5)
    assert engine.step(Signal.STORED, 0.0) == StoreBatch(EndResync(at(9)))
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(at(9))
    assert engine.phase is Phase.LIVE
    assert engine.step(Signal.NOTHING, 0.0).since == at(9)


def test_after_a_resync_batches_are_ranges_from_its_end_again():
    engine = resyncing(records=1)
    drive(engine, Listed(at(9)), VanishedKeys([]), Signal.STORED, Signal.NOTHING)
    nine = numbered(9, 1)
    assert drive(engine, received(nine), Signal.APPLIED) == StoreBatch(AppliedRange([nine], at(9), at(10)))


def test_a_failing_store_during_the_new_listing_keeps_its_order():
    engine = resyncing(records=1)
    drive(engine, received(FIVE), Signal.APPLIED, Signal.STORE_FAILED, received(SIX))
    assert isinstance(engine.step(Signal.APPLIED, 0.0), Receive)
    assert isinstance(engine.step(Listed(at(9)), 0.0), Pause)  # nothing is swept before the store has all of it
    assert engine.step(Signal.NOTHING, 1.0) == StoreBatch(ResyncWrite([FIVE, SIX]))
    assert engine.step(Signal.STORED, 1.0) == FindVanishedKeys(frozenset({b"k5", b"k6"}))


def test_a_store_that_fails_at_the_end_of_a_resync_is_tried_again_and_nothing_else_happens_meanwhile():
    engine = resyncing()
    drive(engine, Listed(at(9)), VanishedKeys([]))
    engine.ask("me")
    assert isinstance(engine.step(Signal.STORE_FAILED, 0.0), Pause)
    assert engine.step(Signal.NOTHING, 1.0) == StoreBatch(EndResync(at(9)))
    assert engine.step(Signal.STORED, 1.0) == ReportCursor(at(9))


def test_sixteen_failures_within_a_resync_end_it_too():
    engine = Engine(Batching(), can_resync=True)
    drive(engine, Began(at(5)), Expired(), VanishedKeys([GONE]))
    assert fail(engine, 16, 0.0) == GiveUp(16)


def test_a_stop_within_a_resync_flushes_and_leaves_the_cursor_and_the_flag():
    engine = resyncing()
    engine.step(received(FIVE), 0.0)
    engine.stop()
    assert engine.step(Signal.NOTHING, 0.0) == Apply([FIVE])
    assert engine.step(Signal.APPLIED, 0.0) == StoreBatch(ResyncWrite([FIVE]))
    assert engine.step(Signal.STORED, 0.0) == Finish(at(5))


def test_a_stream_that_ends_within_its_listing_does_not_end_the_resync():
    engine = resyncing()
    engine.step(received(FIVE), 0.0)
    assert drive(engine, Ended(), Signal.APPLIED, Signal.STORED) == Finish(at(5))


def test_a_resync_to_where_the_cursor_was_reports_nothing():
    engine = resyncing()
    drive(engine, Listed(at(5)), VanishedKeys([]))
    assert isinstance(engine.step(Signal.STORED, 0.0), Receive)


def test_an_unsettled_store_is_resynced_before_anything_is_opened():
    engine = Engine(Batching(), can_resync=True)
    assert engine.step(Began(at(5), unsettled=True), 0.0) == FindVanishedKeys()
    assert engine.step(VanishedKeys([]), 0.0) == StoreBatch(BeginResync())
    assert engine.step(Signal.STORED, 0.0) == Open(None)


def test_without_a_reader_a_store_is_put_at_the_streams_beginning_before_the_full_watch():
    engine = Engine(Batching(records=1))
    engine.step(Began(at(50)), 0.0)
    assert engine.step(Expired(at(0)), 0.0) == StoreBatch(BeginResync())
    assert isinstance(engine.step(Signal.STORE_FAILED, 0.0), Pause)
    assert engine.step(Signal.NOTHING, 1.0) == StoreBatch(BeginResync())
    assert engine.step(Signal.STORED, 1.0) == StoreBatch(EndResync(at(0)))
    assert engine.step(Signal.STORED, 1.0) == Open(None)
    engine.step(Signal.OPENED, 1.0)
    assert engine.phase is Phase.LIVE
    assert drive(engine, received(FIVE), Signal.APPLIED, now=1.0) == StoreBatch(AppliedRange([FIVE], at(0), at(6)))


def test_without_reader_and_store_an_expired_cursor_means_a_full_watch_whose_cursors_come_from_below():
    engine = Engine(Batching(records=1))
    assert engine.step(Began(at(50)), 0.0) == Open(at(50))
    assert engine.step(Expired(), 0.0) == Open(None)
    engine.step(Signal.OPENED, 0.0)
    assert drive(engine, received(FIVE), Signal.APPLIED) == StoreBatch(AppliedRange([FIVE], None, at(6)))
    assert engine.step(Signal.STORED, 0.0) == ReportCursor(at(6))
