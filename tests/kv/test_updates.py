"""Keyed values: scopes, and changes as columns."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from strandline.errors import InvalidInput
from strandline.followers.stores.state import MemoryStore
from strandline.model.keyed import EVERYTHING, UNKNOWN, Prefix, Update, Updates
from strandline.model.records import READ_SCHEMA, Op
from tests.followers.scripted_watch import at, delete, given, held, put

ROWS = (put(3, b"a", b"1"), delete(4, b"b"), put(7, b"c", b""), Update(Op.PURGE, b"a", None, 9))


def columnar(updates: Updates) -> Updates:
    """The same updates as an Arrow table that was not converted to rows yet."""
    assert updates.upto is not None
    return Updates.of_table(updates.table(), updates.upto)


@pytest.fixture(params=["rows", "table"])
def updates(request):
    made = given(*ROWS)
    return made if request.param == "rows" else columnar(made)


# --- scopes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefixes", "kept"),
    [
        ((b"a",), (b"a",)),
        ((b"b", b"a"), (b"a", b"b")),
        ((b"a", b"a"), (b"a",)),
        ((b"ab", b"a", b"abc"), (b"a",)),
        ((b"a.", b"a", b"b", b"a-"), (b"a", b"b")),
        ((b"ab", b"a\xff", b"b"), (b"ab", b"a\xff", b"b")),
        ((b"", b"a", b"b"), (b"",)),
        ((b"\xff", b"\xff\xff", b"\x00"), (b"\x00", b"\xff")),
        (("é", "é1", b"\xc3"), (b"\xc3",)),
        (("node.", b"node."), (b"node.",)),
    ],
)
def test_a_scope_keeps_its_prefixes_sorted_once_each_and_without_those_that_another_covers(prefixes, kept):
    assert Prefix(*prefixes).prefixes == kept


def test_two_scopes_of_the_same_keys_are_equal_and_hash_alike():
    assert Prefix("a", "ab") == Prefix(b"a")
    assert hash(Prefix("a", "ab")) == hash(Prefix(b"a"))
    assert Prefix("a") != Prefix("b")
    assert Prefix("a") != (b"a",)


def test_a_scope_survives_pickling():
    scope = Prefix("b", b"a\xff")
    assert pickle.loads(pickle.dumps(scope)) == scope


def test_a_scope_without_a_prefix_is_refused():
    with pytest.raises(InvalidInput, match="EVERYTHING"):
        Prefix()


def test_the_empty_prefix_is_everything_whatever_the_other_prefixes():
    assert EVERYTHING.everything
    assert Prefix("a", "").everything
    assert not Prefix("a").everything
    assert b"" in EVERYTHING
    assert b"" not in Prefix("a")


@pytest.mark.parametrize("scope", [EVERYTHING, Prefix("a"), Prefix("a", "b\xff", b"\xff"), Prefix("ab", "a.", "zz")])
def test_the_mask_of_a_column_equals_a_lookup_of_each_key(scope):
    keys = [b"", b"a", b"ab", b"a.b", b"b", b"b\xff", "b\xff".encode(), b"\xff\xff", b"z", b"zz", None]
    expected = [key is not None and key in scope for key in keys]
    assert scope.mask(pa.array(keys, pa.binary())).to_pylist() == expected
    assert scope.mask(pa.chunked_array([keys[:4], [], keys[4:]], pa.binary())).to_pylist() == expected


def test_the_mask_of_an_empty_column_is_empty():
    assert Prefix("a", "b").mask(pa.array([], pa.binary())).to_pylist() == []


# --- changes as columns ----------------------------------------------------------------------------------------


def test_changes_are_a_sequence_of_their_rows_in_either_form(updates):
    assert len(updates) == 4
    assert tuple(updates) == ROWS
    assert tuple(updates[index] for index in range(4)) == ROWS
    assert updates[-1] == ROWS[-1]
    assert updates[1:3] == list(ROWS[1:3])
    assert list(updates.keys) == [b"a", b"b", b"c", b"a"]
    assert updates.upto == at(10)
    with pytest.raises(IndexError):
        updates[4]


def test_changes_as_a_table_are_records_with_the_versions_as_offsets(updates):
    table = updates.table()
    assert table.schema == READ_SCHEMA
    assert table.column("offset").to_pylist() == [3, 4, 7, 9]
    assert table.column("op").to_pylist() == [Op.PUT, Op.DELETE, Op.PUT, Op.PURGE]
    assert table.column("value").to_pylist() == [b"1", None, b"", None]
    assert Updates.of_table(table, at(10)) == updates


def test_changes_in_arrow_are_converted_on_first_access():
    made = columnar(given(*ROWS))
    assert made.columnar
    assert len(made) == 4
    head, rest = made.split(2)
    assert head.columnar
    assert rest.columnar
    assert Updates.joined([head, rest]).columnar
    assert made.columnar
    list(made)
    assert not made.columnar


def test_the_rows_of_an_untouched_table_and_of_python_join(updates):
    both = Updates.joined([columnar(given(*ROWS)), given(put(11, b"d"))])
    assert tuple(both) == (*ROWS, put(11, b"d"))
    assert both.upto == at(12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_split_gives_two_parts_that_join_to_the_whole_with_the_cursor_between_them(updates, count):
    head, rest = updates.split(count)
    assert rest is not None
    assert len(head) == count
    assert head.upto == at(ROWS[count].version)
    assert rest.upto == updates.upto
    assert Updates.joined([head, rest]) == updates


@pytest.mark.parametrize("count", [4, 5, 100])
def test_a_split_beyond_the_end_is_the_whole(updates, count):
    head, rest = updates.split(count)
    assert head == updates
    assert rest is None


def test_changes_without_a_row_carry_their_cursor_and_split_and_join():
    empty = Updates((), (), (), (), at(40))
    assert empty.split(10) == (empty, None)
    joined = Updates.joined([given(put(1, b"a")), empty])
    assert joined.upto == at(40)
    assert joined.table().num_rows == 1
    assert empty.table().schema == READ_SCHEMA


def test_nothing_joined_is_nothing_without_a_cursor():
    nothing = Updates.joined([])
    assert len(nothing) == 0
    assert nothing.upto is None
    assert nothing.table().num_rows == 0


def test_removals_carry_no_cursor_and_cannot_be_split():
    removals = Updates.removals([b"a", b"b"])
    assert list(removals) == [delete(None, b"a"), delete(None, b"b")]
    assert removals.upto is None
    with pytest.raises(InvalidInput, match="stream"):
        removals.split(1)


def test_removals_joined_to_changes_leave_the_cursor_of_the_changes():
    assert Updates.joined([given(put(4, b"a")), Updates.removals([b"b"])]).upto == at(5)


# --- unknown versions ------------------------------------------------------------------------------------------


def test_an_unknown_version_never_moves_the_cursor():
    assert given(put(None, b"a"), since=5).upto == at(5)
    assert given(put(6, b"a"), put(None, b"b"), since=5).upto == at(7)
    assert given(put(3, b"a"), since=5).upto == at(5)


def test_an_unknown_version_is_none_again_when_it_is_looked_at():
    made = given(put(None, b"a"), put(2, b"b"))
    assert list(made.columns[3]) == [UNKNOWN, 2]
    assert made[0].version is None


def test_a_split_never_leaves_a_rest_that_begins_with_an_unknown_version():
    made = given(put(1, b"a"), put(None, b"b"), put(None, b"c"), put(2, b"d"))
    head, rest = made.split(1)
    assert [update.key for update in head] == [b"a", b"b", b"c"]
    assert head.upto == at(2)
    assert rest is not None
    assert [update.key for update in rest] == [b"d"]
    assert given(put(1, b"a"), put(None, b"b"), put(None, b"c")).split(1)[1] is None


def test_an_unknown_version_gets_the_offset_of_the_next_known_one_or_of_the_end():
    made = given(put(None, b"a"), put(4, b"b"), put(None, b"c"), put(None, b"d"), put(7, b"e"), put(None, b"f"))
    assert made.table().column("offset").to_pylist() == [4, 4, 7, 7, 7, 7]


def test_a_range_given_again_in_a_larger_one_leaves_no_older_value():
    # The answer to the first was lost; a value of unknown version is not to come back over the newer one.
    store = MemoryStore()
    first = given(put(None, b"a", b"old"), put(5, b"a", b"new"))
    store.apply(first.table(), since=at(0), upto=at(6))
    both = Updates.joined([given(put(None, b"a", b"old"), put(5, b"a", b"new")), given(put(6, b"b"))])
    store.apply(both.table(), since=at(0), upto=at(7))
    assert held(store) == {b"a": b"new", b"b": b"v"}
