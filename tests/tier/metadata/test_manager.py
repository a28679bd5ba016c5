"""The metadata manager, sentence by sentence: who may answer, when, and what becomes of writes and restarts."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from strandline.errors import (
    CommitTimedOut,
    InvalidInput,
    LogClosed,
    NotReady,
    OutcomeUnknown,
    StorageError,
    StrandlineError,
)
from strandline.formats.segment.events import encode_event
from strandline.log.topic.memory import MemoryTopic
from strandline.model.cursor import Cursor
from strandline.model.segments import PartitionDeleteState, SegmentState
from strandline.snapshots.sealed import seal
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.simdisk import SimulatedDisk
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.metadata.state import CatchingUp, Ready, Unassigned
from tests.tier.metadata.manager_doubles import (
    FOLDER,
    PARTITIONS,
    TERM,
    Events,
    copied,
    delete,
    managed,
    place,
    segment,
    settled,
    story,
    update,
)

HERE = place(1)
THERE = place(2)
READS: dict[str, tuple[Callable[[MetadataManager], object], object]] = {
    "segment_for": (lambda manager: manager.segment_for(HERE, TERM, 0), None),
    "highest_offset": (lambda manager: manager.highest_offset(HERE, TERM), None),
    "segments": (lambda manager: manager.segments(HERE), []),
    "segments of a term": (lambda manager: manager.segments(HERE, TERM), []),
    "unreferenced": (lambda manager: manager.unreferenced(HERE), []),
    "size": (lambda manager: manager.size(HERE, TERM), 0),
    "deletion": (lambda manager: manager.deletion(HERE), None),
    "get": (lambda manager: manager.get(segment(HERE, 0).segment), None),
}


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def found(manager: MetadataManager, number: int = 0, where=HERE) -> bool:
    return manager.segment_for(where, TERM, 100 * number) is not None


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("strandline_segment_events_total", {"outcome": outcome}) or 0.0


# --- start -----------------------------------------------------------------------------------------------------


def test_starting_consumes_nothing(events, disk):
    events.tell(*copied(HERE, 0))
    manager = managed(events, disk)
    assert not manager.step()
    assert manager.assigned_partitions() == []
    assert events.delivered.total() == 0
    assert manager.committed_offset(1) == -1


def test_without_a_snapshot_everything_is_replayed_with_a_warning(events, disk, caplog):
    events.tell(*copied(HERE, 0))
    manager = managed(events, disk)
    assert "no snapshot" in caplog.text
    manager.reconcile_assignment([1])
    assert found(settled(manager))


def saved(events: Events, disk: SimulatedDisk, partitions=(1, 2)) -> None:
    manager = managed(events, disk)
    manager.reconcile_assignment(partitions)
    settled(manager).close()


def test_with_a_damaged_snapshot_everything_is_replayed_with_a_warning(events, disk, caplog):
    events.tell(*copied(HERE, 0))
    saved(events, disk)
    for path in disk.files():
        disk.damage(path, 0, b"\xff" * 8)
    manager = managed(events, disk)
    assert "skipped" in caplog.text
    assert "are replayed" in caplog.text
    assert manager.committed_offset(1) == -1
    manager.reconcile_assignment([1])
    assert found(settled(manager))


def test_with_a_snapshot_of_another_partition_count_everything_is_replayed_with_a_warning(disk, caplog):
    saved(Events(PARTITIONS), disk)
    few = Events(PARTITIONS)
    few.tell(*copied(HERE, 0))
    saved(few, disk)
    many = Events(2 * PARTITIONS)
    manager = managed(many, disk)
    assert f"{PARTITIONS} partitions and not {2 * PARTITIONS}" in caplog.text
    assert [manager.committed_offset(number) for number in range(2 * PARTITIONS)] == [-1] * 2 * PARTITIONS


def test_with_a_snapshot_of_something_else_everything_is_replayed_with_a_warning(events, disk, caplog):
    cursor = Cursor(place(0).topic_id, 5)
    seal(
        f"{FOLDER}/{7:020d}", kind="fold", kind_version=1, cursor=cursor,
        fill=lambda data: disk.write_new(f"{data}/a", [b"a"]), verify=lambda _: cursor, env=Env(disk=disk),
    )  # fmt: skip
    managed(events, disk)
    assert "cannot be used" in caplog.text


def test_with_a_snapshot_of_another_topic_everything_is_replayed_with_a_warning(events, disk, caplog):
    events.tell(*copied(HERE, 0))
    saved(events, disk)
    events.topic_id = HERE.topic_id
    manager = managed(events, disk)
    assert "of topic" in caplog.text
    assert manager.committed_offset(1) == -1


def test_a_disk_that_cannot_be_read_does_not_keep_it_from_starting(events, disk, caplog):
    class Unreadable(SimulatedDisk):
        def scan(self, path):
            raise StorageError("The disk refused.")

    manager = managed(events, Unreadable())
    assert "cannot be used" in caplog.text
    manager.reconcile_assignment([1])
    assert manager.segments(HERE) == []


# --- assignment ------------------------------------------------------------------------------------------------


def test_reconciling_adds_what_is_new_and_drops_what_is_gone(events):
    manager = managed(events)
    manager.reconcile_assignment([3, 1])
    assert manager.assigned_partitions() == [1, 3]
    manager.reconcile_assignment([2, 3])
    assert manager.assigned_partitions() == [2, 3]
    manager.reconcile_assignment([])
    assert manager.assigned_partitions() == []


@pytest.mark.parametrize("wrong", [-1, PARTITIONS])
def test_a_partition_that_is_not_there_is_refused_and_nothing_is_changed(events, wrong):
    manager = managed(events)
    manager.reconcile_assignment([1])
    with pytest.raises(InvalidInput, match=str(wrong)):
        manager.reconcile_assignment([2, wrong])
    with pytest.raises(InvalidInput, match=str(wrong)):
        manager.committed_offset(wrong)
    assert manager.assigned_partitions() == [1]


def test_a_partition_is_ready_when_what_was_there_at_its_assignment_is_applied(events):
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    manager = managed(events)
    manager.reconcile_assignment([1])
    events.tell(segment(HERE, 2))
    assert manager.ask(HERE, story(HERE)) == CatchingUp(1, manager._partitions[1].readiness.why)
    with pytest.raises(NotReady, match="partition 1"):
        manager.segment_for(HERE, TERM, 0)
    settled(manager)
    assert found(manager)
    assert manager.committed_offset(1) == 4


def test_an_empty_partition_is_ready_at_once(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    assert manager.segments(HERE) == []
    assert manager.committed_offset(1) == -1


def test_a_fully_trimmed_partition_is_ready_at_once_and_goes_on(events):
    events.tell(*copied(HERE, 0))
    events.trim(1, 2)
    manager = managed(events)
    manager.reconcile_assignment([1])
    assert manager.segments(HERE) == []
    manager.add(segment(HERE, 1))
    assert manager.segments(HERE) == [segment(HERE, 1)]


def test_a_high_water_mark_that_cannot_be_fetched_gates_and_a_later_reconcile_heals_it(events, caplog):
    events.tell(*copied(HERE, 0))
    events.unknown = {1}
    manager = managed(events)
    manager.reconcile_assignment([1, 2])
    assert manager.assigned_partitions() == [1, 2]
    assert "Metadata partition 1 cannot be started" in caplog.text
    settled(manager)
    with pytest.raises(NotReady):
        manager.segments(HERE)
    assert manager.segments(THERE) == []  # the other one is not held up
    manager.reconcile_assignment([1, 2])
    with pytest.raises(NotReady):
        manager.segments(HERE)
    events.unknown = set()
    manager.reconcile_assignment([1, 2])
    with pytest.raises(NotReady):
        manager.segments(HERE)  # it is known now, but not reached
    assert found(settled(manager))
    assert events.delivered[1] == 2


def test_a_high_water_mark_that_cannot_be_fetched_is_tried_again_by_a_timer():
    events, clock = Events(), ManualClock(auto=False)
    events.tell(*copied(HERE, 0))
    events.unknown = {1}
    with managed(events, clock=clock, background=True) as manager:
        manager.reconcile_assignment([1])
        asked = events.asked[1]
        while events.asked[1] == asked:
            assert clock.wait_until_blocked(1)
            clock.advance(1.0)
        with pytest.raises(NotReady):
            manager.segments(HERE)
        events.unknown = set()
        while isinstance(manager.ask(HERE, story(HERE)), CatchingUp):
            clock.advance(1.0)
        assert found(manager)


def test_even_a_partition_without_events_is_not_ready_while_its_high_water_mark_is_unknown(events):
    events.unknown = {1}
    manager = managed(events)
    manager.reconcile_assignment([1])
    with pytest.raises(NotReady):
        manager.segments(HERE)


def test_removing_and_adding_again_resumes_duplicates_nothing_and_resurrects_nothing(events):
    first, second = segment(HERE, 0), segment(HERE, 1)
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    manager = managed(events)
    manager.reconcile_assignment([1])
    settled(manager)
    manager.reconcile_assignment([])
    events.tell(update(first, SegmentState.DELETE_STARTED), update(first, SegmentState.DELETE_FINISHED))
    assert not manager.step()
    assert manager.committed_offset(1) == 3
    manager.reconcile_assignment([1])
    with pytest.raises(NotReady):
        manager.segments(HERE)  # what it holds still has the segment that was deleted meanwhile
    settled(manager)
    assert [each.segment for each in manager.segments(HERE)] == [second.segment]
    assert events.delivered[1] == 6


def test_messages_taken_before_a_removal_are_not_applied_after_it(events):
    """A batch is on its way to the cache while the partition is removed, and while it is added again."""
    events.tell(*copied(HERE, 0))
    manager = managed(events)
    manager.reconcile_assignment([1])
    late = manager._subscription.take(0)
    manager.reconcile_assignment([])
    manager._follower._apply(1, late)
    assert manager.committed_offset(1) == -1
    manager.reconcile_assignment([1])
    manager._follower._apply(1, late[:1])
    settled(manager)
    manager._follower._apply(1, late)
    assert manager.committed_offset(1) == 1
    assert len(manager.segments(HERE)) == 1


def test_events_out_of_order_skip_no_gap_and_are_taken_again(events, caplog):
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    manager = managed(events)
    manager.reconcile_assignment([1])
    manager._follower._apply(1, manager._subscription.take(0)[2:])
    assert manager.committed_offset(1) == -1
    assert "out of order" in caplog.text
    manager.step()
    settled(manager)
    assert [found(manager, number) for number in (0, 1)] == [True, True]


def test_the_backlog_comes_before_what_is_published_while_a_partition_is_added(events):
    told = segment(HERE, 0)
    events.tell(told)
    manager = managed(events)
    manager.reconcile_assignment([2])
    settled(manager)
    events.after_bounds = lambda: events.tell(update(told))  # would be refused before its add
    manager.reconcile_assignment([1, 2])
    refused = counted("refused")
    settled(manager)
    assert found(manager)
    assert counted("refused") == refused
    assert events.delivered[1] == 2


def test_reconciling_from_many_threads_is_serialised(events):
    manager = managed(events)
    inside, most = [0], [0]
    real = events.bounds

    def bounds(partition):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        try:
            return real(partition)
        finally:
            inside[0] -= 1

    events.bounds = bounds
    wishes = [{0, 1}, {1, 2}, {2, 3}, {0, 3}]

    def reconcile(wish):
        for _ in range(50):
            manager.reconcile_assignment(wish)

    threads = [threading.Thread(target=reconcile, args=(wish,)) for wish in wishes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert set(manager.assigned_partitions()) in wishes
    assert manager._follower.assignment.partitions() == manager.assigned_partitions()


# --- reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READS)
def test_every_read_is_gated(events, name):
    read, none = READS[name]
    told = segment(HERE, 0)
    # The second one takes the place of the first, so that each question has an answer.
    other = segment(HERE, 0, segment=segment(HERE, 9).segment, end=199, terms=((TERM, 0), (TERM + 1, 150)))
    events.tell(told, update(told), other, update(other), delete(HERE))
    manager = managed(events)
    assert read(manager) == none
    manager.reconcile_assignment([1])
    with pytest.raises(NotReady, match="partition 1"):
        read(manager)
    settled(manager)
    answer = read(manager)
    if name != "unreferenced":  # what that is, is the cache's matter
        assert answer not in (none, None)
    manager.reconcile_assignment([2])
    assert read(manager) == none
    manager.reconcile_assignment([1, 2])
    assert read(settled(manager)) == answer
    manager.close()
    assert read(manager) == answer


def test_a_partition_this_node_does_not_consume_is_not_answered_from_what_it_once_saw(events, disk):
    events.tell(*copied(HERE, 0))
    manager = managed(events, disk)
    manager.reconcile_assignment([1])
    assert found(settled(manager))
    manager.reconcile_assignment([])
    assert manager.ask(HERE, story(HERE)) == Unassigned(1)
    assert not found(manager)
    manager.close()
    again = managed(events, disk)
    assert again.committed_offset(1) == 1
    assert again.ask(HERE, story(HERE)) == Unassigned(1)
    with pytest.raises(NotReady):
        again.current(HERE, story(HERE))


def test_a_current_read_sees_all_events_that_were_published_before_it(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    events.tell(*copied(HERE, 0))
    assert not found(manager)  # ready, by what was there when it was assigned
    assert manager.current(HERE, lambda cache: cache.segment_for(HERE, TERM, 0)) is not None


def test_a_current_read_is_retryable_where_the_partition_is_not_assigned(events):
    manager = managed(events)
    with pytest.raises(NotReady, match="not assigned") as caught:
        manager.current(HERE, story(HERE))
    assert caught.value.retryable


def test_a_current_read_is_retryable_if_the_high_water_mark_is_unknown(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    events.unknown = {1}
    with pytest.raises(NotReady, match="high-water mark"):
        manager.current(HERE, story(HERE))
    assert manager.segments(HERE) == []


def test_a_current_read_waits_no_longer_than_its_timeout(events, clock):
    manager = managed(events, clock=clock)
    manager.reconcile_assignment([1])
    events.tell(*copied(HERE, 0))
    events.held = True
    with pytest.raises(NotReady, match="up to 2 in 5 s"):
        manager.current(HERE, story(HERE), timeout=5)
    assert clock.monotonic() == pytest.approx(5, abs=0.1)
    events.held = False
    assert manager.current(HERE, lambda cache: len(list(cache.segments(HERE)))) == 1


def test_two_managers_on_one_topic_converge(events):
    ours, theirs = managed(events), managed(events)
    for manager in (ours, theirs):
        manager.reconcile_assignment(range(PARTITIONS))
    for number in range(6):
        told = segment(place(number % PARTITIONS), number)
        (ours, theirs)[number % 2].add(told)
        settled((ours, theirs)[1 - number % 2])
        (theirs, ours)[number % 2].update(update(told))
    settled(ours)
    settled(theirs)
    for number in range(PARTITIONS):
        where = place(number)
        answer = ours.ask(where, story(where))
        assert isinstance(answer, Ready)
        assert theirs.ask(where, story(where)) == answer


def test_two_nodes_that_split_the_partitions_answer_only_for_their_own(events):
    ours, theirs = managed(events), managed(events)
    ours.reconcile_assignment([0, 1])
    theirs.reconcile_assignment([2, 3])
    ours.publish_all(copied(HERE, 0))
    theirs.publish_all(copied(THERE, 0))
    settled(ours)
    settled(theirs)
    assert (found(ours), found(ours, where=THERE)) == (True, False)
    assert (found(theirs), found(theirs, where=THERE)) == (False, True)
    assert ours.committed_offset(2) == theirs.committed_offset(1) == -1


# --- writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [state for state in SegmentState if state is not SegmentState.COPY_STARTED])
def test_an_add_that_is_not_copy_started_publishes_nothing(events, state):
    manager = managed(events)
    manager.reconcile_assignment([1])
    events.unknown = {2}
    manager.reconcile_assignment([1, 2])
    for where in (HERE, THERE):  # ready or not
        with pytest.raises(InvalidInput, match=str(state)):
            manager.add(segment(where, 0, state=state))
    assert events.published == 0


def test_eager_rejection_publishes_nothing(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    told = segment(HERE, 0)
    with pytest.raises(InvalidInput):
        manager.update(update(told))
    with pytest.raises(InvalidInput):
        manager.put_partition_delete(delete(HERE, PartitionDeleteState.FINISHED))
    manager.add(told)
    with pytest.raises(InvalidInput):
        manager.add(segment(HERE, 0, size=11))
    with pytest.raises(InvalidInput):
        manager.update(update(told, SegmentState.DELETE_FINISHED))
    assert events.published == 1


def test_a_write_that_returned_is_visible_to_the_next_read():
    events = Events()
    with MetadataManager.start(events, background=True) as manager:
        manager.reconcile_assignment([1])
        for number in range(50):
            told = segment(HERE, number)
            manager.add(told)
            assert manager.get(told.segment) == told
            manager.update(update(told))
            assert found(manager, number)
        manager.put_partition_delete(delete(HERE))
        assert manager.deletion(HERE) == delete(HERE)


def test_an_exact_retry_is_fine(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    for _ in range(2):
        manager.add(segment(HERE, 0))
    for _ in range(2):
        manager.update(update(segment(HERE, 0)))
    assert len(manager.segments(HERE)) == 1


def test_a_write_that_lost_a_race_gets_the_error_of_its_application(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    told = segment(HERE, 0)
    manager.add(told)
    events.before_publish = lambda: events.tell(update(told, SegmentState.DELETE_STARTED, broker=2))
    with pytest.raises(InvalidInput, match="delete started"):
        manager.update(update(told))
    assert events.published == 2
    assert manager.get(told.segment).broker == 2
    assert not manager._partitions[1]._refused


def test_a_write_that_was_applied_before_its_offset_was_known_still_gets_its_outcome(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    told = segment(HERE, 0)
    events.after_publish = lambda: settled(manager)
    manager.add(told)
    events.before_publish = lambda: events.tell(update(told, SegmentState.DELETE_STARTED, broker=2))
    events.after_publish = lambda: settled(manager)
    with pytest.raises(InvalidInput, match="delete started"):
        manager.update(update(told))


def test_one_writer_s_error_is_not_another_s(events):
    """Two wait at once, and only the second event is refused."""
    manager = managed(events)
    manager.reconcile_assignment([1])
    ours, theirs = segment(HERE, 0), segment(HERE, 0, size=11)
    outcome: list[object] = []

    def other() -> None:
        try:
            outcome.append(manager.add(ours))
        except InvalidInput as error:
            outcome.append(error)

    events.before_publish = other  # both were checked before either was published
    with pytest.raises(InvalidInput):
        manager.add(theirs)
    assert outcome == [None]
    assert manager.get(ours.segment) == ours


def test_a_write_to_a_partition_that_is_not_assigned_fails_at_once(events, clock):
    manager = managed(events, clock=clock)
    with pytest.raises(NotReady, match="not assigned"):
        manager.add(segment(HERE, 0))
    assert events.published == 0
    assert clock.monotonic() == 0


def test_a_write_that_is_not_applied_in_time_says_so_after_thirty_seconds(events, clock):
    manager = managed(events, clock=clock)
    manager.reconcile_assignment([1])
    events.held = True
    with pytest.raises(CommitTimedOut, match="Event 0 of metadata partition 1 is published") as caught:
        manager.add(segment(HERE, 0))
    assert caught.value.retryable
    assert clock.monotonic() == pytest.approx(30, abs=0.1)
    events.held = False
    manager.add(segment(HERE, 0))
    assert manager.segments(HERE) == [segment(HERE, 0)]


def test_while_it_catches_up_a_write_is_not_refused_by_what_is_not_applied_yet(events):
    told = segment(HERE, 0)
    events.tell(told)
    manager = managed(events)
    manager.reconcile_assignment([1])
    manager.update(update(told))
    assert found(manager)


def test_while_it_catches_up_a_write_is_published_unchecked_and_gets_its_outcome(events):
    told = segment(HERE, 0)
    events.tell(told, update(told))
    manager = managed(events)
    manager.reconcile_assignment([1])
    with pytest.raises(InvalidInput):
        manager.add(segment(HERE, 0, size=11))  # nobody could know before
    assert events.published == 1
    assert found(manager)


@pytest.mark.parametrize(
    ("interruption", "error"),
    [
        (lambda manager: manager.reconcile_assignment([2]), NotReady),
        (lambda manager: manager.close(), OutcomeUnknown),
    ],
    ids=["unassigned", "closed"],
)
@pytest.mark.parametrize("wait", ["write", "current"])
def test_a_waiter_fails_at_once_when_the_partition_is_unassigned_or_the_manager_closed(interruption, error, wait):
    events, clock = Events(), ManualClock(auto=False)  # no time passes: it cannot be the timeout
    events.held = True
    manager = managed(events, clock=clock)
    manager._rounds.is_background = True  # waits without stepping; nobody follows
    manager.reconcile_assignment([1])
    caught: list[StrandlineError] = []

    def act() -> None:
        try:
            if wait == "write":
                manager.add(segment(HERE, 0))
            else:
                events.tell(segment(HERE, 0))
                manager.current(HERE, story(HERE))
        except StrandlineError as failure:
            caught.append(failure)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    assert clock.wait_until_blocked(1)
    interruption(manager)
    thread.join(120)
    assert [type(failure) for failure in caught] == [error]


def test_a_write_that_waits_gets_an_error_although_its_partition_was_assigned_again(events):
    manager = managed(events)
    manager.reconcile_assignment([1])

    def away() -> None:
        manager.reconcile_assignment([])
        manager.reconcile_assignment([1])

    events.after_publish = away
    with pytest.raises(NotReady, match="unassigned from this node"):
        manager.add(segment(HERE, 0))


def test_after_closing_reads_answer_from_what_was_applied_and_writes_fail(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    manager.publish_all(copied(HERE, 0))
    events.tell(*copied(HERE, 1))
    manager.close()
    manager.close()
    assert (found(manager, 0), found(manager, 1)) == (True, False)
    published = events.published
    for write in (
        lambda: manager.add(segment(HERE, 2)),
        lambda: manager.update(update(segment(HERE, 0), SegmentState.DELETE_STARTED)),
        lambda: manager.put_partition_delete(delete(HERE)),
        lambda: manager.current(HERE, story(HERE)),
        lambda: manager.reconcile_assignment([2]),
    ):
        with pytest.raises(LogClosed):
            write()
    assert events.published == published
    assert manager.assigned_partitions() == [1]


def test_what_was_not_ready_when_it_was_closed_stays_so(events):
    events.tell(*copied(HERE, 0))
    manager = managed(events)
    manager.reconcile_assignment([1])
    manager.close()
    with pytest.raises(NotReady):
        manager.segments(HERE)


# --- many at once ----------------------------------------------------------------------------------------------


def test_many_events_are_published_in_one_go_and_visible(events):
    manager = managed(events)
    manager.reconcile_assignment(range(PARTITIONS))
    told = [event for number in range(5) for where in (HERE, THERE) for event in copied(where, number)]
    manager.publish_all(told)
    assert all(found(manager, number, where) for number in range(5) for where in (HERE, THERE))
    manager.publish_all([])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: [*copied(HERE, 0), update(segment(HERE, 0), SegmentState.DELETE_FINISHED)],
        lambda: [segment(HERE, 0), segment(HERE, 0, size=11)],
        lambda: [*copied(THERE, 0), update(segment(HERE, 5))],
        lambda: [*copied(THERE, 0), delete(HERE, PartitionDeleteState.STARTED)],
    ],
    ids=["a step left out", "added twice", "unknown in another partition", "a deletion"],
)
def test_if_one_of_many_is_refused_nothing_is_published(events, bad):
    manager = managed(events)
    manager.reconcile_assignment([1, 2])
    with pytest.raises(InvalidInput):
        manager.publish_all(bad())
    assert events.published == 0
    assert manager.segments(THERE) == []


def test_if_one_of_many_lost_a_race_its_error_is_raised_and_the_others_took_effect(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    events.before_publish = lambda: events.tell(segment(HERE, 1, broker=2))
    with pytest.raises(InvalidInput) as caught:
        manager.publish_all([segment(HERE, 0), segment(HERE, 1), segment(HERE, 2)])
    assert caught.value.__notes__ == ["1 of 3 events were refused; the others took effect."]
    assert [each.broker for each in manager.segments(HERE)] == [1, 2, 1]


def test_many_to_a_partition_that_is_not_assigned_publish_nothing_anywhere(events):
    manager = managed(events)
    manager.reconcile_assignment([1])
    with pytest.raises(NotReady):
        manager.publish_all([segment(HERE, 0), segment(THERE, 0)])
    assert events.published == 0


# --- events that cannot be applied -----------------------------------------------------------------------------


def test_an_undecodable_event_is_counted_logged_with_its_position_and_skipped(events, caplog):
    events.tell(segment(HERE, 0))
    events.inner.publish(1, b"no event")
    events.tell(update(segment(HERE, 0)))
    before = counted("undecodable")
    manager = managed(events)
    manager.reconcile_assignment([1])
    settled(manager)
    assert counted("undecodable") == before + 1
    assert "Event 1 of metadata partition 1" in caplog.text
    assert found(manager)
    assert manager.committed_offset(1) == 2


NEWER = b"\x01\x00\x01" + encode_event(segment(HERE, 0))[3:]
"""An add of version 1."""


def test_an_unknown_version_makes_the_partition_not_ready_with_upgrade(events, disk, caplog):
    events.tell(*copied(HERE, 0), *copied(THERE, 0))
    events.inner.publish(1, NEWER)
    events.tell(*copied(HERE, 1))
    manager = managed(events, disk)
    manager.reconcile_assignment([1, 2])
    settled(manager)
    for read, _ in READS.values():
        with pytest.raises(NotReady, match="upgrade"):
            read(manager)
    assert found(manager, where=THERE)
    assert manager.committed_offset(1) == 1
    published = events.published
    with pytest.raises(NotReady, match="upgrade"):
        manager.add(segment(HERE, 5))
    assert events.published == published
    manager.reconcile_assignment([2])
    manager.reconcile_assignment([1, 2])
    settled(manager)
    with pytest.raises(NotReady, match="upgrade"):
        manager.segments(HERE)
    manager.close()
    assert managed(events, disk).committed_offset(1) == 1  # the upgraded program goes on with that event


def test_an_event_of_an_unknown_version_fails_the_waiters_at_once(events, clock):
    manager = managed(events, clock=clock)
    manager.reconcile_assignment([1])
    events.before_publish = lambda: events.inner.publish(1, NEWER)
    with pytest.raises(NotReady, match="upgrade"):
        manager.add(segment(HERE, 0))
    assert clock.monotonic() == 0


def test_a_cache_that_fails_leaves_nothing_that_could_be_trusted(events, disk, monkeypatch, caplog):
    events.tell(*copied(HERE, 0))
    manager = managed(events, disk)
    manager.reconcile_assignment([1])
    settled(manager)
    events.tell(*copied(HERE, 1))
    with monkeypatch.context() as broken:
        broken.setattr(SegmentCache, "apply", lambda _, __: 1 // 0)
        settled(manager)
    with pytest.raises(NotReady, match="ZeroDivisionError"):
        manager.segments(HERE)
    assert manager.committed_offset(1) == -1
    manager.reconcile_assignment([])
    manager.reconcile_assignment([1])
    settled(manager)
    assert [found(manager, number) for number in (0, 1)] == [True, True]


def test_events_that_cannot_be_taken_are_taken_later(events, caplog):
    events.tell(*copied(HERE, 0))
    manager = managed(events)
    manager.reconcile_assignment([1])
    events.broken = True
    assert not manager.step()
    assert "cannot be taken" in caplog.text
    assert found(settled(manager))


# --- topics that do not have the position ----------------------------------------------------------------------


def test_events_deleted_while_they_are_followed_are_replayed_and_it_is_not_ready_meanwhile(events, caplog):
    events.tell(*copied(HERE, 0), *copied(THERE, 0))
    manager = managed(events)
    manager.reconcile_assignment([1, 2])
    settled(manager)
    events.tell(*copied(HERE, 1), *copied(HERE, 2))
    events.trim(1, 4)
    assert manager.step()
    assert "are deleted" in caplog.text
    with pytest.raises(NotReady):
        manager.segments(HERE)
    settled(manager)
    assert [found(manager, number) for number in range(3)] == [False, False, True]
    assert found(manager, where=THERE)
    assert manager.committed_offset(1) == 5


def test_a_snapshot_below_what_is_retained_is_replayed_with_a_warning(events, disk, caplog):
    events.tell(*copied(HERE, 0))
    saved(events, disk)
    events.tell(*copied(HERE, 1), *copied(HERE, 2))
    events.trim(1, 4)
    manager = managed(events, disk)
    manager.reconcile_assignment([1])
    assert "those below 4 are deleted" in caplog.text
    with pytest.raises(NotReady):
        manager.segments(HERE)
    settled(manager)
    assert [found(manager, number) for number in range(3)] == [False, False, True]


def test_a_snapshot_past_the_end_is_replayed_with_a_warning(events, disk, caplog):
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    saved(events, disk)
    anew = Events()
    anew.tell(*copied(HERE, 5))
    manager = managed(anew, disk)
    manager.reconcile_assignment([1])
    assert "there are only 2" in caplog.text
    settled(manager)
    assert [found(manager, number) for number in (0, 1, 5)] == [False, False, True]


def test_a_position_past_the_end_is_not_waited_for_while_the_high_water_mark_is_unknown(events, disk):
    """Following first and looking later would put new events on top of what another topic told."""
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    saved(events, disk)
    anew = Events()
    anew.unknown = {1}
    manager = managed(anew, disk)
    manager.reconcile_assignment([1])
    anew.tell(*copied(HERE, 5))
    settled(manager)
    anew.unknown = set()
    settled(manager)
    anew.tell(*copied(HERE, 6), *copied(HERE, 7))
    settled(manager)
    assert [each.start for each in manager.segments(HERE)] == [500, 600, 700]


@pytest.mark.parametrize("way", ["write", "current"])
def test_a_topic_that_was_created_again_under_a_follower_is_detected(events, way, caplog):
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    manager = managed(events)
    manager.reconcile_assignment([1])
    settled(manager)
    anew = Events()
    events.inner = anew.inner
    manager._subscription._inner, fresh = anew.inner.subscribe()
    manager._follower.assignment = fresh
    with pytest.raises(NotReady, match="created again"):
        manager.add(segment(HERE, 5)) if way == "write" else manager.current(HERE, story(HERE))
    assert "are replayed" in caplog.text
    settled(manager)
    assert [each.start for each in manager.segments(HERE)] == ([500] if way == "write" else [])


def test_a_partition_trimmed_while_it_is_begun_is_begun_again(events):
    events.tell(*copied(HERE, 0), *copied(HERE, 1))
    manager = managed(events)
    events.after_bounds = lambda: events.trim(1, 2)
    manager.reconcile_assignment([1])
    settled(manager)
    assert [found(manager, number) for number in (0, 1)] == [False, True]


# --- snapshots -------------------------------------------------------------------------------------------------


def test_resuming_from_a_snapshot_replays_only_the_rest(events, disk, caplog):
    for number in range(20):
        events.tell(*copied(HERE, number))
    saved(events, disk)
    assert events.delivered[1] == 40
    events.tell(*copied(HERE, 20))
    caplog.clear()
    manager = managed(events, disk)
    assert manager.committed_offset(1) == 39
    manager.reconcile_assignment([1])
    with pytest.raises(NotReady):
        manager.segments(HERE)
    settled(manager)
    assert events.delivered[1] == 42
    assert [found(manager, number) for number in range(21)] == [True] * 21
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def snapshots(disk: SimulatedDisk) -> list[str]:
    return [row.name for row in disk.scan(FOLDER) if row.name.isdecimal()]


def test_a_snapshot_is_taken_at_each_interval_in_which_any_partition_advanced(events, disk, clock):
    manager = managed(events, disk, clock, snapshot_interval=60)
    manager.reconcile_assignment([1, 2])
    clock.advance(61)
    manager.step()
    assert snapshots(disk) == []
    for number, where in enumerate((HERE, THERE, HERE, THERE), start=1):
        manager.add(segment(where, number))
        before = snapshots(disk)
        clock.advance(58)
        manager.step()
        assert snapshots(disk) == before
        clock.advance(3)
        manager.step()
        assert int(snapshots(disk)[-1]) == number
        clock.advance(61)
        manager.step()
        assert int(snapshots(disk)[-1]) == number
    assert len(snapshots(disk)) == 2
    again = managed(events, disk)
    assert (again.committed_offset(1), again.committed_offset(2)) == (1, 1)


def test_closing_takes_a_snapshot_if_anything_advanced(events, disk):
    manager = managed(events, disk)
    manager.reconcile_assignment([1])
    manager.add(segment(HERE, 0))
    manager.close()
    assert len(snapshots(disk)) == 1
    again = managed(events, disk)
    again.reconcile_assignment([1])
    again.close()
    assert len(snapshots(disk)) == 1


def test_a_snapshot_that_failed_warns_and_is_tried_again(events, disk, clock, caplog):
    manager = managed(events, disk, clock)
    manager.reconcile_assignment([1])
    manager.add(segment(HERE, 0))
    for turn in range(2):
        disk.interrupt(len(disk.calls), StorageError("The disk is full."))
        clock.advance(61)
        manager.step()
        assert caplog.text.count("The snapshot of the segment cache failed") == turn + 1
        assert snapshots(disk) == []
    clock.advance(61)
    manager.step()
    assert len(snapshots(disk)) == 1
    assert managed(events, disk).committed_offset(1) == 0


def test_a_last_snapshot_that_fails_does_not_keep_it_from_closing(events, disk, caplog):
    manager = managed(events, disk)
    manager.reconcile_assignment([1])
    manager.add(segment(HERE, 0))
    disk.interrupt(len(disk.calls), StorageError("The disk is full."))
    manager.close()
    assert "The snapshot of the segment cache failed" in caplog.text
    assert manager.segments(HERE) == [segment(HERE, 0)]


def test_a_partition_that_is_not_assigned_any_more_stays_in_the_snapshot(events, disk):
    events.tell(*copied(HERE, 0), *copied(THERE, 0))
    saved(events, disk)
    manager = managed(events, disk)
    manager.reconcile_assignment([2])
    manager.add(segment(THERE, 1))
    manager.close()
    again = managed(events, disk)
    assert (again.committed_offset(1), again.committed_offset(2)) == (1, 2)
    again.reconcile_assignment([1])
    assert found(again)
    assert events.delivered[1] == 2


def test_writing_a_snapshot_stops_neither_readers_nor_the_follower(events, clock):
    """While the disk writes, another thread applies and reads."""
    seen: list[bool] = []

    class Busy(SimulatedDisk):
        def write_new(self, path, parts):
            if not seen:
                thread = threading.Thread(target=lambda: seen.append(found(settled_follower(), 1)))
                thread.start()
                thread.join(120)
            super().write_new(path, parts)

    def settled_follower() -> MetadataManager:
        while manager._follower.step(0):
            pass
        return manager

    disk = Busy()
    manager = managed(events, disk, clock)
    manager.reconcile_assignment([1])
    manager.publish_all(copied(HERE, 0))
    events.tell(*copied(HERE, 1))
    clock.advance(61)
    manager._rounds.tick()
    assert seen == [True]
    again = managed(events, disk)
    assert again.committed_offset(1) == 1  # what came while it was written is not in it
    again.reconcile_assignment([1])
    settled(again)
    assert [found(again, number) for number in (0, 1)] == [True, True]


def test_without_a_folder_nothing_is_stored_and_each_start_replays(events):
    with managed(events) as manager:
        manager.reconcile_assignment([1])
        manager.add(segment(HERE, 0))
    assert managed(events).committed_offset(1) == -1


def test_an_interval_that_is_not_positive_is_refused(events):
    with pytest.raises(InvalidInput, match="seconds above 0"):
        managed(events, snapshot_interval=0)


def test_on_a_real_disk_with_threads_it_follows_saves_and_comes_back(tmp_path, events):
    with MetadataManager.start(events, tmp_path, snapshot_interval=0.01) as manager:
        manager.reconcile_assignment([1, 2])
        for number in range(20):
            manager.publish_all(copied(HERE, number))
        assert all(found(manager, number) for number in range(20))
    delivered = events.delivered[1]
    with MetadataManager.start(events, tmp_path) as again:
        again.reconcile_assignment([1])
        assert again.current(HERE, lambda cache: len(list(cache.segments(HERE)))) == 20
    assert events.delivered[1] == delivered == 40


def test_a_manager_that_is_dropped_without_being_closed_ends_its_threads_and_its_subscription():
    topic = MemoryTopic(3)
    before = set(threading.enumerate())
    manager = MetadataManager.start(topic)
    manager.reconcile_assignment(range(3))
    manager.publish_all(copied(HERE, 0))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    dropped = weakref.ref(manager)
    del manager
    gc.collect()
    assert dropped() is None
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not topic._subscriptions
    assert isinstance(topic.publish(1, b"the topic is the caller's"), int)
