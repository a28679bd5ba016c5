"""The names of a rule's tables: stored before the tables, shared by followers, and refused when damaged."""

from uuid import UUID

import pytest

from strandline.errors import CorruptData, Diverged, UnsupportedVersion
from strandline.followers.routes.names import FILE, NamesKeeper
from strandline.formats.json.checked import sealed
from strandline.formats.json.route_names import RouteNames, RouteNamesCodec
from strandline.model.cursor import Cursor
from strandline.model.stamp import Stamped
from strandline.storage.env import SYSTEM
from strandline.storage.objects.urls import open_store

LOG = UUID(int=7)
START = Cursor(LOG, 5)
BY = "field a"


def keeper(name: str, start: Cursor = START) -> NamesKeeper:
    """A keeper that has looked at what is there."""
    found = NamesKeeper(f"memory://names-{name}", SYSTEM)
    found.opened(start, BY)
    return found


def test_a_new_route_begins_at_its_start_and_stores_nothing_before_its_first_name():
    new = keeper("new")
    assert (new.known, new.is_stored) == (RouteNames(START, {}, BY), False)
    assert keeper("new", START.at(9)).known == RouteNames(START.at(9), {}, BY)
    new.add([], START)
    assert (new.is_stored, keeper("new", START.at(9)).known) == (True, RouteNames(START, {}, BY))


def test_followers_share_names_and_the_first_one_says_where_a_table_begins():
    one, other = keeper("shared"), keeper("shared")
    assert one.add(["a"], START.at(8)).names == {"a": 8}
    assert other.add(["b", "a"], START.at(9)).names == {"a": 8, "b": 9}
    assert keeper("shared", START.at(100)).known.names == {"a": 8, "b": 9}


def test_the_cursor_of_the_names_never_moves_back():
    one, other = keeper("cursor"), keeper("cursor")
    assert one.advance(START.at(9)).next == 9
    assert other.advance(START.at(7)).next == 9
    assert keeper("cursor").known.cursor.next == 9


def test_the_names_of_another_log_are_refused():
    late = keeper("other", Cursor(UUID(int=8), 0))
    keeper("other").add(["a"], START)
    with pytest.raises(Diverged, match="tables of its own"):
        keeper("other", Cursor(UUID(int=8), 0))
    with pytest.raises(Diverged, match="tables of its own"):
        late.add(["b"], Cursor(UUID(int=8), 0))
    with pytest.raises(Diverged, match=r"by field a, not of .* by header b"):
        NamesKeeper("memory://names-other", SYSTEM).opened(START, "header b")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "strandline-other"},
        {"names": ["a"]},
        {"names": {"../a": 1}},
        {"names": {"a": -1}},
        {"names": {"a": 1.5}},
        {"cursor": "somewhere"},
        {"cursor": None},
        {"recent": 3},
        {"by": None},
    ],
)
def test_damaged_names_are_refused_and_said(change):
    fields = {
        "kind": "strandline-route-names",
        "version": 1,
        "revision": 1,
        "recent": [],
        "cursor": str(START),
        "by": BY,
    }
    data = sealed({**fields, "names": {"a": 1}, **change})
    with pytest.raises(CorruptData, match="is damaged"):
        RouteNamesCodec().decode(data, "names.json")


def test_names_without_their_checksum_or_of_a_newer_release_are_refused():
    data = RouteNamesCodec().encode(Stamped(RouteNames(START, {"a": 5}, BY), 1))
    assert RouteNamesCodec().decode(data, "x").value == RouteNames(START, {"a": 5}, BY)
    with pytest.raises(CorruptData, match="checksum"):
        RouteNamesCodec().decode(data.replace(b'"a": 5', b'"a": 6'), "x")
    with pytest.raises(UnsupportedVersion, match="version 2"):
        RouteNamesCodec().decode(data.replace(b'"version": 1', b'"version": 2'), "x")


def test_an_object_that_is_removed_meanwhile_is_stored_again_with_all_that_its_follower_knows():
    one = keeper("lost")
    one.add(["a"], START.at(8))
    open_store("memory://names-lost").delete(FILE)
    one.advance(START.at(9))
    assert keeper("lost", START.at(100)).known == RouteNames(START.at(9), {"a": 8}, BY)
