"""Rules of all stores of the package: applying updates equals applying their table."""

import pytest

from strandline.errors import Gap, NullKey
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.rocks import RocksStore
from strandline.followers.stores.state import MemoryStore
from strandline.model.cursor import Cursor
from strandline.model.keyed import Update, Updates
from strandline.model.records import Op
from strandline.storage.env import Env
from strandline.testing.sinks import LOG
from tests.disk_doubles import RecordingDisk

AT = Cursor(LOG, 0)


@pytest.fixture(params=["memory", "append-log", "rocksdb"])
def stores(request, tmp_path):
    """Two stores of one kind."""
    opened = {
        "memory": lambda _: MemoryStore(),
        "append-log": lambda name: AppendLogStore.open(str(tmp_path / name), sync=False),
        "rocksdb": lambda name: RocksStore.open(str(tmp_path / name), sync=False),
    }[request.param]
    pair = opened("one"), opened("other")
    yield pair
    for store in pair:
        store.close()


def updates(*rows, since):
    return Updates.of([Update(op, key, value, version) for op, key, value, version in rows], since)


ROWS = [
    (Op.PUT, b"a", b"1", 0),
    (Op.PUT, b"b", b"", 1),
    (Op.PUT, b"c", None, 2),
    (Op.DELETE, b"a", None, 3),
    (Op.PUT, b"d", b"4", 4),
    (Op.PURGE, b"b", None, 5),
]


def same(stores):
    one, other = stores
    assert list(one.range()) == list(other.range())
    assert one.position() == other.position()
    return dict(one.range())


def test_updates_are_taken_as_their_table_is(stores):
    one, other = stores
    some = updates(*ROWS, since=AT)
    one.apply(some, since=AT, upto=some.upto)
    other.apply(some.table(), since=AT, upto=some.upto)
    assert same(stores) == {b"c": b"", b"d": b"4"}


def test_of_updates_that_overlap_the_cursor_only_the_rest_is_taken(stores):
    first, whole = updates(*ROWS[:4], since=AT), updates((Op.PUT, b"a", b"ghost", 0), *ROWS[1:], since=AT)
    for store in stores:
        store.apply(first.table(), since=AT, upto=first.upto)
    stores[0].apply(whole, since=AT, upto=whole.upto)
    stores[1].apply(whole.table(), since=AT, upto=whole.upto)
    assert same(stores) == {b"c": b"", b"d": b"4"}


def test_updates_below_the_cursor_change_nothing_and_those_above_it_are_a_gap(stores):
    some = updates(*ROWS, since=AT)
    for store in stores:
        store.apply(some, since=AT, upto=some.upto)
        store.apply(updates((Op.PUT, b"d", b"old", 4), since=AT), since=AT, upto=AT.at(5))
        late = updates((Op.PUT, b"x", b"", 9), since=AT)
        with pytest.raises(Gap):
            store.apply(late, since=AT.at(9), upto=late.upto)
    assert same(stores) == {b"c": b"", b"d": b"4"}


def test_an_update_without_key_is_refused_and_nothing_is_applied(stores):
    for store in stores:
        with pytest.raises(NullKey, match="offset 1 has no key, and a store keeps one value per key"):
            store.apply(Updates([0, 0], [b"a", None], [b"", b""], [0, 1], AT.at(2)), since=AT, upto=AT.at(2))
    assert same(stores) == {}


def test_removals_of_a_resync_are_taken_as_their_table_is(stores):
    some, gone = updates(*ROWS[:2], since=AT), Updates.removals([b"a"])
    for store, form in zip(stores, (gone, gone.table()), strict=True):
        store.apply(some, since=AT, upto=some.upto)
        store.begin_resync(LOG)
        store.resync(form)
        store.end_resync(AT.at(7))
    assert same(stores) == {b"b": b""}


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore])
def test_a_folder_that_is_there_already_gets_its_name_synced(kind, tmp_path):
    folder = tmp_path / "made by one that died"
    folder.mkdir()
    disk = RecordingDisk()
    kind.open(str(folder), env=Env(disk=disk)).close()
    assert ("sync_folder", str(tmp_path)) in [(event.action, event.path) for event in disk.events]
