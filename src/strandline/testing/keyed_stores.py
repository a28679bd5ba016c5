"""Contract suite for stores: every sentence of the store's contract, as a test."""
# ruff: noqa: D102 - the name of a test is its sentence, and its numbers are its example

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import Diverged, InvalidInput, NotReady, NullKey
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, Op, record_batch, with_offsets
from strandline.model.sink import Sink, Store, StorePosition
from strandline.testing.sinks import DELETE, LOG, Change, SinkContract, changes, folded

OTHER = UUID(int=2)


def content(store: Store, prefix: bytes = b"") -> dict[bytes, bytes]:
    """The content of a store under a prefix."""
    return dict(store.range(prefix))


class StoreContract(SinkContract):
    """Every sentence of :class:`~strandline.model.sink.Store`, as a test.

    A subclass named ``Test...`` defines the fixture ``sink``, an empty store for each test that the fixture closes.
    Stores that outlive their process inherit :class:`DurableStoreContract`, those that export
    :class:`~strandline.testing.store_snapshots.ExportingStoreContract`.
    """

    null = b""

    def content(self, sink: Sink) -> Mapping[bytes | None, bytes | None]:
        assert isinstance(sink, Store)
        return dict(sink.range())

    @pytest.fixture
    def store(self, sink: Store) -> Store:
        return sink

    # --- reading -----------------------------------------------------------------------------------------------

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)

    def test_an_empty_store_has_no_keys_and_no_cursor(self, store: Store) -> None:
        assert store.position() == StorePosition(None)
        assert store.get(b"a") is None
        assert list(store.range()) == []

    def test_a_value_is_read_by_its_key_and_an_absent_key_is_none(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"), (b"", b"of the empty key"), (b"empty", b""))
        assert store.get(b"a") == b"1"
        assert store.get(b"") == b"of the empty key"
        assert store.get(b"empty") == b""
        assert store.get(b"b") is None

    @pytest.mark.parametrize("key", ["text", None, 7], ids=["text", "None", "a number"])
    def test_asked_for_what_is_not_bytes_it_refuses_and_does_not_say_that_it_is_absent(
        self, store: Store, key: Any
    ) -> None:
        self.apply(store, 0, (b"text", b"1"))
        for call in (lambda: store.get(key), lambda: list(store.range(key))):
            with pytest.raises(InvalidInput, match="bytes"):
                call()
        assert store.get(memoryview(b"text")) == b"1"  # type: ignore[arg-type]
        assert list(store.range(bytearray(b"te"))) == [(b"text", b"1")]  # type: ignore[arg-type]

    def test_a_deleted_key_is_absent(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"), (b"b", b"2"))
        self.apply(store, 2, (b"a", DELETE))
        assert store.get(b"a") is None
        assert content(store) == {b"b": b"2"}

    def test_a_purge_removes_like_a_delete(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"), (b"b", b"2"))
        purge = record_batch(timestamps=[0], ops=[Op.PURGE], keys=[b"a"], values=[None])
        store.apply(pa.Table.from_batches(with_offsets([purge], 2), READ_SCHEMA), since=at, upto=at.at(3))
        assert content(store) == {b"b": b"2"}

    def test_a_null_value_is_the_empty_one(self, store: Store) -> None:
        self.apply(store, 0, (b"a", None))
        assert store.get(b"a") == b""

    def test_a_record_without_key_is_refused_by_its_offset_and_changes_nothing(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"))
        with pytest.raises(NullKey, match="offset 2"):
            self.apply(store, 1, (b"b", b"2"), (None, b"3"), (b"c", b"4"))
        assert store.position() == StorePosition(at)
        assert content(store) == {b"a": b"1"}
        self.apply(store, 1, (b"b", b"2"))
        assert content(store) == {b"a": b"1", b"b": b"2"}

    def test_keys_and_values_of_any_bytes_come_back(self, store: Store) -> None:
        rows = {bytes([byte]) * 3: bytes(range(256)) + bytes([byte]) for byte in range(256)}
        self.apply(store, 0, *rows.items())
        assert content(store) == rows
        assert all(store.get(key) == value for key, value in rows.items())

    def test_a_range_is_sorted_by_the_bytes_of_its_keys(self, store: Store) -> None:
        keys = [b"b", b"a", b"\xff", b"", b"a\x00", b"ab", b"\x80", b"B"]
        self.apply(store, 0, *((key, key) for key in keys))
        assert [key for key, _ in store.range()] == sorted(keys)

    def test_a_range_holds_exactly_the_keys_that_begin_with_the_prefix(self, store: Store) -> None:
        keys = [b"a", b"a\xff", b"a\xff\xff", b"a\xff\xffz", b"b", b"\xff", b"\xff\xff", b"\xff\xffa", b""]
        self.apply(store, 0, *((key, b"v") for key in keys))
        for prefix in (b"", b"a", b"a\xff", b"\xff", b"\xff\xff", b"c", b"a\x00", b"\xff\xff\xff"):
            assert [key for key, _ in store.range(prefix)] == sorted(key for key in keys if key.startswith(prefix))

    def test_a_range_shows_the_state_as_of_its_call_while_writes_continue(self, store: Store) -> None:
        rows: list[Change] = [(b"k%03d" % number, b"old") for number in range(500)]
        self.apply(store, 0, *rows)
        reading = store.range(b"k")
        first = next(iter(reading))
        later: list[Change] = [(key, DELETE if number % 2 else b"new") for number, (key, _) in enumerate(rows)]
        self.apply(store, 500, *later, (b"k0005", b"new"))
        assert [first, *reading] == [(key, b"old") for key, _ in rows]
        assert content(store) == folded([*rows, *later, (b"k0005", b"new")])

    def test_ranges_stay_sorted_as_keys_come_and_go(self, store: Store) -> None:
        ever: list[Change] = []
        for turn in range(40):
            rows: list[Change] = [
                (b"%d" % (number * 7919 % 211), DELETE if (number + turn) % 3 == 0 else b"%d" % number)
                for number in range(turn * 5, turn * 5 + turn % 13 * 10 + 1)
            ]
            self.apply(store, len(ever), *rows)
            ever += rows
            truth = folded(ever)
            assert list(store.range()) == sorted(truth.items(), key=lambda row: row[0] or b"")
            assert [key for key, _ in store.range(b"1")] == sorted(key for key in truth if key and key[:1] == b"1")

    def test_other_threads_read_whole_writes_while_they_go_on(self, store: Store) -> None:
        rounds, keys = 12, [b"k%02d" % number for number in range(20)]
        torn: list[object] = []
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                seen = set(content(store, b"k").values())
                if len(seen) > 1:
                    torn.append(seen)

        reader = threading.Thread(target=look)
        reader.start()
        try:
            at = 0
            for turn in range(rounds):
                # Every other write removes and puts each key again, so that a partial write would show.
                gone: list[Change] = [(key, DELETE) for key in keys] if turn % 2 else []
                at = self.apply(store, at, *gone, *((key, b"%d" % turn) for key in keys)).next
        finally:
            done.set()
            reader.join()
        assert torn == []

    def test_large_values_come_back(self, store: Store) -> None:
        value = bytes(range(256)) * 20_000
        self.apply(store, 0, (b"large", value), (b"small", b"x"))
        assert store.get(b"large") == value
        assert store.get(b"small") == b"x"

    # --- following ---------------------------------------------------------------------------------------------

    def test_the_position_names_the_stream_it_is_in(self, store: Store) -> None:
        upto = self.apply(store, 0, (b"a", b"1"))
        with pytest.raises(Diverged):
            store.cursor(OTHER)
        assert store.position() == StorePosition(upto)

    def test_a_range_of_another_stream_is_diverged_and_changes_nothing(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"))
        cursor = Cursor(OTHER, 1)
        with pytest.raises(Diverged):
            store.apply(changes(1, (b"a", b"2")), since=cursor, upto=cursor.at(2))
        assert store.position() == StorePosition(at)
        assert content(store) == {b"a": b"1"}

    def test_the_term_of_a_cursor_is_kept(self, store: Store) -> None:
        cursor = Cursor(LOG, 0, 7)
        store.apply(changes(0, (b"a", b"1")), since=cursor, upto=cursor.at(1))
        assert store.cursor(LOG) == Cursor(LOG, 1, 7)

    def test_records_in_many_small_pieces_are_applied_in_their_order(self, store: Store) -> None:
        rows: list[Change] = [(b"k%d" % (number % 5), b"%d" % number) for number in range(30)]
        table = pa.concat_tables([changes(number, row) for number, row in enumerate(rows)])
        cursor = Cursor(LOG, 0)
        store.apply(table, since=cursor, upto=cursor.at(30))
        assert content(store) == folded(rows)

    # --- resync ------------------------------------------------------------------------------------------------

    def test_a_resync_applies_outside_the_rule_of_offsets_and_the_cursor_stays(self, store: Store) -> None:
        at = self.apply(store, 5, (b"a", b"1"), (b"b", b"2"))
        store.begin_resync(LOG)
        assert store.position() == StorePosition(at, LOG)
        store.resync(changes(0, (b"a", DELETE), (b"c", b"3")))
        store.resync(changes(0, (b"c", b"4")))
        assert store.position() == StorePosition(at, LOG)
        assert content(store) == {b"b": b"2", b"c": b"4"}

    def test_a_resync_ends_at_its_cursor(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"))
        store.begin_resync(OTHER)
        store.resync(changes(0, (b"a", DELETE), (b"b", b"2")))
        end = Cursor(OTHER, 90, 3)
        store.end_resync(end)
        assert store.position() == StorePosition(end)
        assert store.cursor(OTHER) == end
        assert content(store) == {b"b": b"2"}
        store.apply(changes(90, (b"c", b"3")), since=end, upto=end.at(91))
        assert content(store) == {b"b": b"2", b"c": b"3"}

    def test_a_newcomer_can_be_resynced(self, store: Store) -> None:
        store.begin_resync(LOG)
        assert store.position() == StorePosition(None, LOG)
        store.resync(changes(0, (b"a", b"1")))
        store.end_resync(Cursor(LOG, 0))
        assert store.position() == StorePosition(Cursor(LOG, 0))
        assert content(store) == {b"a": b"1"}

    def test_during_a_resync_nothing_is_applied_and_there_is_no_cursor(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"))
        store.begin_resync(LOG)
        with pytest.raises(NotReady):
            store.cursor(LOG)
        with pytest.raises(NotReady):
            self.apply(store, 1, (b"a", b"2"))
        assert store.position() == StorePosition(at, LOG)
        assert content(store) == {b"a": b"1"}

    def test_a_resync_can_be_begun_again_and_of_another_stream_too(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"))
        store.begin_resync(LOG)
        store.begin_resync(LOG)
        store.begin_resync(OTHER)
        assert store.position() == StorePosition(at, OTHER)
        with pytest.raises(InvalidInput):
            store.end_resync(Cursor(LOG, 9))
        assert store.position() == StorePosition(at, OTHER)
        store.end_resync(Cursor(OTHER, 9))
        assert store.position() == StorePosition(Cursor(OTHER, 9))

    def test_without_a_begin_there_is_no_resync_and_no_end_of_one(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"))
        with pytest.raises(InvalidInput):
            store.resync(changes(0, (b"a", b"2")))
        with pytest.raises(InvalidInput):
            store.end_resync(Cursor(LOG, 9))
        assert store.position() == StorePosition(at)
        assert content(store) == {b"a": b"1"}

    def test_a_resync_without_records_changes_nothing(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"))
        store.begin_resync(LOG)
        store.resync(READ_SCHEMA.empty_table())
        assert content(store) == {b"a": b"1"}

    def test_a_record_without_key_is_refused_in_a_resync_too(self, store: Store) -> None:
        store.begin_resync(LOG)
        with pytest.raises(NullKey):
            store.resync(changes(0, (b"a", b"1"), (None, b"2")))
        assert content(store) == {}

    # --- the end -----------------------------------------------------------------------------------------------

    def test_an_export_within_a_resync_is_not_ready(self, store: Store, tmp_path: Path) -> None:
        self.apply(store, 0, (b"a", b"1"))
        store.begin_resync(LOG)
        with pytest.raises(NotReady):
            store.export_to(str(tmp_path / "snapshot"))

    def test_closing_twice_is_fine(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"))
        store.close()
        store.close()


class DurableStoreContract(StoreContract):
    """The sentences about a store that is opened again."""

    @abstractmethod
    def reopen(self, store: Store) -> Store:
        """Close the store and open it again; the fixture ``sink`` closes the returned one, too."""

    def test_state_and_cursor_are_there_when_it_is_opened_again(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"), (b"b", b"2"))
        upto = self.apply(store, 2, (b"a", DELETE), (b"c", None))
        again = self.reopen(store)
        assert again.position() == StorePosition(upto)
        assert content(again) == {b"b": b"2", b"c": b""}
        later = self.apply(again, 4, (b"d", b"4"))
        once_more = self.reopen(again)
        assert once_more.cursor(LOG) == later
        assert content(once_more) == {b"b": b"2", b"c": b"", b"d": b"4"}

    def test_an_empty_store_opens_again_as_a_newcomer(self, store: Store) -> None:
        again = self.reopen(store)
        assert again.position() == StorePosition(None)
        assert list(again.range()) == []

    def test_a_cursor_moved_without_records_is_there_when_it_is_opened_again(self, store: Store) -> None:
        cursor = Cursor(LOG, 40, 2)
        store.apply(READ_SCHEMA.empty_table(), since=cursor, upto=cursor)
        assert self.reopen(store).position() == StorePosition(cursor)

    def test_a_resync_under_way_is_still_under_way_when_it_is_opened_again(self, store: Store) -> None:
        at = self.apply(store, 0, (b"a", b"1"))
        store.begin_resync(OTHER)
        store.resync(changes(0, (b"b", b"2")))
        again = self.reopen(store)
        assert again.position() == StorePosition(at, OTHER)
        assert content(again) == {b"a": b"1", b"b": b"2"}
        again.resync(changes(0, (b"a", DELETE)))
        again.end_resync(Cursor(OTHER, 7))
        ended = self.reopen(again)
        assert ended.position() == StorePosition(Cursor(OTHER, 7))
        assert content(ended) == {b"b": b"2"}

    def test_the_rule_of_offsets_holds_for_a_store_that_was_opened_again(self, store: Store) -> None:
        self.apply(store, 0, (b"a", b"1"), (b"b", DELETE))
        again = self.reopen(store)
        self.apply(again, 0, (b"a", b"0"), (b"b", b"ghost"), (b"c", b"3"))
        assert content(again) == {b"a": b"1", b"c": b"3"}

    def test_many_writes_come_back(self, store: Store) -> None:
        rows: list[Change] = [
            (b"k%d" % (number * 31 % 97), DELETE if number % 7 == 0 else b"v%d" % number) for number in range(600)
        ]
        for first in range(0, 600, 12):
            self.apply(store, first, *rows[first : first + 12])
        assert content(store) == folded(rows)
        again = self.reopen(store)
        assert content(again) == folded(rows)
        assert list(again.range()) == sorted(content(again).items())
