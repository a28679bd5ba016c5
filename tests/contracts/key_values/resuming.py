"""Contract of cursors: resuming, cursors that cannot be resumed, and gaps."""

from __future__ import annotations

import random
import threading
from uuid import UUID

import pytest

from strandline.errors import CursorExpired, Gap
from strandline.kv.contract import KeyValue
from strandline.model.cursor import Cursor
from strandline.model.keyed import Scope, Update
from strandline.model.records import Op
from strandline.testing.stores import together
from tests.contracts.key_values.hooks import (
    IN_EVERY_SCOPE,
    KEYS,
    SOON,
    Collected,
    KeyValueOwner,
    brief,
    current,
    fill,
    fold,
    in_every_scope,
)


class ResumingContract(KeyValueOwner):
    """Every sentence about cursors and gaps, as a test."""

    # --- resuming -------------------------------------------------------------------------------------------

    @in_every_scope
    def test_no_cursor_means_the_full_watch(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch_from(scope, None) as subscription:
            taken = Collected(subscription).until_listed()
        assert fold(taken.rows).keys() == {key for key in KEYS if key in scope}

    @in_every_scope
    def test_watch_from_gives_only_what_came_after(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        cursor = self.cursor(kv, scope)
        fill(kv, b"2")
        kv.put(b"node.1.x", b"last")
        with kv.watch_from(scope, cursor) as subscription:
            taken = Collected(subscription).until_key(b"node.1.x", b"last")
        assert taken.listed is None, "only a full watch lists"
        assert fold(taken.rows) == {key: value for key, value in current(kv).items() if key in scope}
        assert all(row.value != b"1" for row in taken.rows)

    @in_every_scope
    def test_a_cursor_at_the_end_waits_for_the_next_change(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        cursor = self.cursor(kv, scope)
        with kv.watch_from(scope, cursor) as subscription:
            taken = Collected(subscription)
            version = kv.put(IN_EVERY_SCOPE, b"2")
            taken.until(lambda: taken.rows)
        assert taken.rows == [Update(Op.PUT, IN_EVERY_SCOPE, b"2", version)]

    @in_every_scope
    def test_a_cursor_of_an_empty_key_value_store_resumes_with_its_first_change(
        self, kv: KeyValue, scope: Scope
    ) -> None:
        cursor = self.cursor(kv, scope)
        version = kv.put(IN_EVERY_SCOPE, b"1")
        with kv.watch_from(scope, cursor) as subscription:
            taken = Collected(subscription)
            taken.until(lambda: taken.rows)
        assert taken.rows == [Update(Op.PUT, IN_EVERY_SCOPE, b"1", version)]

    @in_every_scope
    def test_removals_that_were_missed_are_given(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
        state = fold(taken.rows)
        kv.delete(b"node.1")
        kv.purge(b"node.10")
        kv.delete(b"other")
        kv.put(b"node.1.x", b"last")
        with kv.watch_from(scope, taken.at()) as subscription:
            taken = Collected(subscription).until_key(b"node.1.x", b"last")
        assert fold(taken.rows, state) == {key: value for key, value in current(kv).items() if key in scope}

    @in_every_scope
    def test_every_cursor_on_the_way_resumes_with_the_rest(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        chunks: list[tuple[Cursor, int]] = []
        with kv.watch(scope) as subscription:
            taken = Collected(subscription)
            while taken.listed is None:
                taken.take(1)
                if taken.upto is not None:
                    chunks.append((taken.at(), len(taken.rows)))
            kv.put(b"node.1.z", b"2")
            kv.put(IN_EVERY_SCOPE, b"last")
            while (IN_EVERY_SCOPE, b"last") not in brief(taken.rows):
                taken.take(1)
                chunks.append((taken.at(), len(taken.rows)))
        for cursor, count in chunks:
            with kv.watch_from(scope, cursor) as subscription:
                rest = Collected(subscription)
                if count < len(taken.rows):
                    rest.until_key(IN_EVERY_SCOPE, b"last")
            assert fold(rest.rows, fold(taken.rows[:count])) == fold(taken.rows)
            assert not set(rest.rows) & set(taken.rows[:count])

    @in_every_scope
    def test_the_cursor_moves_over_what_is_out_of_scope(self, kv: KeyValue, scope: Scope) -> None:
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            last = [kv.put(b"zzz.%d" % number, b"1") for number in range(20)][-1]
            taken.until(lambda: taken.at().next > last)
        assert len(taken.rows) == (20 if scope.everything else 0)

    @in_every_scope
    def test_resuming_over_what_is_out_of_scope_moves_the_cursor_too(self, kv: KeyValue, scope: Scope) -> None:
        cursor = self.cursor(kv, scope)
        last = [kv.put(b"zzz.%d" % number, b"1") for number in range(20)][-1]
        with kv.watch_from(scope, cursor) as subscription:
            taken = Collected(subscription)
            taken.until(lambda: taken.upto is not None and taken.at().next > last)
        assert len(taken.rows) == (20 if scope.everything else 0)

    # --- cursors that cannot be resumed from ----------------------------------------------------------------

    @in_every_scope
    def test_a_cursor_of_a_key_value_store_that_was_created_anew_is_expired(self, kv: KeyValue, scope: Scope) -> None:
        empty = self.cursor(kv, scope)
        fill(kv)
        full = self.cursor(kv, scope)
        recreated = self.recreate(kv)
        for _ in range(3):
            for cursor in (empty, full):
                with pytest.raises(CursorExpired):
                    recreated.watch_from(scope, cursor)
            fill(recreated)
        assert self.cursor(recreated, scope).log_id != full.log_id

    def test_a_key_value_store_that_was_created_anew_is_empty(self, kv: KeyValue) -> None:
        fill(kv)
        recreated = self.recreate(kv)
        assert current(recreated) == {}
        fill(recreated, b"2")
        assert set(current(recreated).values()) == {b"2"}

    @in_every_scope
    def test_a_cursor_of_another_stream_is_expired(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        here = self.cursor(kv, scope)
        with pytest.raises(CursorExpired):
            kv.watch_from(scope, Cursor(UUID(int=7), here.next))

    @in_every_scope
    def test_a_cursor_past_the_end_is_expired(self, kv: KeyValue, scope: Scope) -> None:
        for _ in range(2):
            end = self.cursor(kv, scope)
            for distance in (1, 2, 1000):
                with pytest.raises(CursorExpired):
                    kv.watch_from(scope, end.at(end.next + distance))
            fill(kv)

    @in_every_scope
    def test_a_cursor_below_what_is_retained_is_expired(self, kv: KeyValue, scope: Scope) -> None:
        empty = self.cursor(kv, scope)
        fill(kv)
        cursor = self.cursor(kv, scope)
        for value in (b"2", b"3", b"4"):
            fill(kv, value)
        self.expire(kv)
        for early in (empty, cursor):
            with pytest.raises(CursorExpired):
                kv.watch_from(scope, early)

    @in_every_scope
    def test_a_cursor_above_what_is_retained_still_resumes(self, kv: KeyValue, scope: Scope) -> None:
        for value in (b"1", b"2", b"3"):
            fill(kv, value)
        self.expire(kv)
        cursor = self.cursor(kv, scope)
        kv.put(IN_EVERY_SCOPE, b"last")
        with kv.watch_from(scope, cursor) as subscription:
            taken = Collected(subscription).until_key(IN_EVERY_SCOPE, b"last")
        assert brief(taken.rows) == [(IN_EVERY_SCOPE, b"last")]

    @in_every_scope
    def test_after_an_expired_cursor_the_full_watch_gives_all_that_is_there(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        for value in (b"2", b"3"):
            fill(kv, value)
        self.expire(kv)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
        assert fold(taken.rows) == {key: value for key, value in current(kv).items() if key in scope}

    # --- gaps -----------------------------------------------------------------------------------------------

    @in_every_scope
    def test_a_gap_ends_a_full_watch_before_anything_past_it_is_given(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            self.check_gap(kv, taken, scope)

    @in_every_scope
    def test_a_gap_ends_a_resumed_watch_before_anything_past_it_is_given(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch_from(scope, self.cursor(kv, scope)) as subscription:
            taken = Collected(subscription)
            kv.put(IN_EVERY_SCOPE, b"seen")
            taken.until_key(IN_EVERY_SCOPE, b"seen")
            self.check_gap(kv, taken, scope)

    def check_gap(self, kv: KeyValue, taken: Collected, scope: Scope) -> None:
        """Overrun the watch: it returns what it has, in order and without a gap, and then only ``Gap``."""
        before = len(taken.rows)
        made = [change for change in self.overrun(kv, taken.subscription) if change.key in scope]
        with pytest.raises(Gap):
            taken.until(lambda: False)
        given = taken.rows[before:]
        assert given == made[: len(given)], "something past the gap was given"
        assert len(given) < len(made)
        assert not made or taken.upto is None or taken.upto.next <= (made[len(given)].version or 0)
        for _ in range(3):
            kv.put(IN_EVERY_SCOPE, b"past the gap")
            with pytest.raises(Gap):
                taken.take(256, 1.0)

    # --- all of it together ---------------------------------------------------------------------------------

    @in_every_scope
    def test_a_folded_state_equals_the_source_whatever_is_written_and_however_often_it_resumes(
        self, kv: KeyValue, scope: Scope
    ) -> None:
        chance = random.Random(repr(scope))
        seeds = [chance.random() for _ in range(2)]

        def write(seed: float) -> None:
            dice = random.Random(seed)
            for number in range(self.rounds // 2):
                key = dice.choice(KEYS)
                match dice.randrange(6):
                    case 0:
                        kv.delete(key)
                    case 1:
                        kv.purge(key)
                    case _:
                        kv.put(key, b"%d" % number)

        state: dict[bytes, bytes] = {}
        cursor: Cursor | None = self.cursor(kv, scope)
        done = threading.Event()

        def follow() -> None:
            nonlocal cursor
            while True:
                rows: list[Update] = []
                try:
                    with kv.watch_from(scope, cursor) as subscription:
                        taken = Collected(subscription)
                        for _ in range(chance.randrange(1, 8)):
                            taken.take(chance.choice((1, 5, 256)), 0.02)
                            cursor, rows = taken.upto or cursor, taken.rows
                except (CursorExpired, Gap):
                    # Where each key keeps one value, a burst over all of them looks like lost changes.
                    rows = []
                    state.clear()
                    cursor = None
                fold(rows, state)
                if done.is_set() and cursor is not None and not rows:
                    return

        follower = threading.Thread(target=follow)
        follower.start()
        try:
            together(*(lambda seed=seed: write(seed) for seed in seeds))
            kv.put(IN_EVERY_SCOPE, b"last")
        finally:
            done.set()
            follower.join(SOON)
        assert not follower.is_alive()
        # The last read may have been too early: one more watch returns the rest.
        if state.get(IN_EVERY_SCOPE) != b"last":
            with kv.watch_from(scope, cursor) as subscription:
                fold(Collected(subscription).until_key(IN_EVERY_SCOPE, b"last").rows, state)
        assert state == {key: value for key, value in current(kv).items() if key in scope}
