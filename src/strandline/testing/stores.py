"""Contract suite for object stores: inherit the class, give it a store, and run it with ``pytest``."""
# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from strandline.errors import AlreadyExists, Conflict, InvalidInput, NotFound, StorageError
from strandline.storage.clock import CLOCK
from strandline.storage.objects.store import ABSENT, Match, ObjectStore, Version, copy_object


def paths(store: ObjectStore, prefix: str = "", start_after: str = "") -> list[str]:
    """The paths of a listing, in order."""
    return [row.path for row in store.list(prefix, start_after=start_after)]


def content(store: ObjectStore, path: str) -> bytes:
    """An object's bytes."""
    return bytes(store.get(path).data)


def together(*tasks: Callable[[], None]) -> None:
    """Run the tasks concurrently, each in a thread, and raise their first error."""
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], None]) -> None:
        start.wait()
        task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        for done in [pool.submit(run, task) for task in tasks]:
            done.result()


class ObjectStoreContract:
    """Every sentence of :class:`~strandline.storage.objects.store.ObjectStore`, as a test.

    A subclass named ``Test...`` defines the fixture ``store``: an empty store for each test.
    """

    nests: ClassVar[bool] = True
    """Whether an object ``a`` can exist beside an object ``a/b``; a file system refuses the second."""

    picklable: ClassVar[bool] = True
    """Whether the store outlives this process, so that a pickled store opens the same one."""

    increments: ClassVar[int] = 2000
    """Number of compare-and-set increments of the races; fewer where each costs an fsync."""

    many: ClassVar[int] = 2100
    """Number of objects of the long listing: more than two pages of the largest page of any store."""

    names: ClassVar[Sequence[str]] = (
        "plain",
        "with space",
        "per%cent",
        "already%20escaped",
        "hash#1",
        "dots..inside",
        ".hidden",
        "ending.",
        "~tilde~",
        "key=value/n=2",
        "plus+and&at@",
        "quote'and\"double",
        "[brackets]{braces}",
        "star*question?",
        "back\\slash",
        "colon:pipe|caret^",
        "ümläut/日本語/🌊",
        "deep/" * 30 + "down",
        "long" * 45,
    )
    """Paths that are unusual, but legal everywhere."""

    # --- reading --------------------------------------------------------------------------------------------

    def test_an_object_is_read_as_it_was_put(self, store: ObjectStore) -> None:
        store.put("a/b", b"content")
        assert content(store, "a/b") == b"content"

    def test_getting_an_absent_object_is_not_found_and_names_it(self, store: ObjectStore) -> None:
        store.put("a/b", b"content")
        for absent in ("other", "a", "a/b/c", "a/bb", "x/y/z"):
            with pytest.raises(NotFound, match=absent):
                store.get(absent)

    def test_a_range_is_exact(self, store: ObjectStore) -> None:
        store.put("a", b"0123456789")
        assert bytes(store.get_range("a", 0, 10)) == b"0123456789"
        assert bytes(store.get_range("a", 3, 4)) == b"3456"
        assert bytes(store.get_range("a", 9, 1)) == b"9"

    def test_an_empty_range_is_empty(self, store: ObjectStore) -> None:
        store.put("a", b"0123456789")
        store.put("empty", b"")
        assert bytes(store.get_range("a", 5, 0)) == b""
        assert bytes(store.get_range("a", 10, 0)) == b""
        assert bytes(store.get_range("empty", 0, 0)) == b""

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (9, 2), (10, 1), (50, 1), (0, 1 << 40), (3, 1 << 62)])
    def test_a_range_past_the_end_is_refused_whatever_its_size(
        self, store: ObjectStore, start: int, length: int
    ) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(InvalidInput):
            store.get_range("a", start, length)

    def test_a_range_of_an_absent_object_is_not_found(self, store: ObjectStore) -> None:
        store.put("a/b", b"content")
        for absent, length in (("other", 1), ("other", 0), ("a", 1), ("a/b/c", 1)):
            with pytest.raises(NotFound):
                store.get_range(absent, 0, length)

    # --- writing --------------------------------------------------------------------------------------------

    def test_a_put_replaces_what_is_there(self, store: ObjectStore) -> None:
        store.put("a", b"a long first content")
        store.put("a", b"second")
        assert content(store, "a") == b"second"
        assert [(row.path, row.size) for row in store.list("")] == [("a", 6)]

    def test_buffers_are_written_one_after_another(self, store: ObjectStore) -> None:
        store.put("a", [b"one ", memoryview(b"two "), b"", memoryview(b"xx three")[3:]])
        assert content(store, "a") == b"one two three"
        version = store.put_if("b", (b"1", b"2"), ABSENT)
        store.put_if("b", [memoryview(b"3"), b"4"], Match(version))
        assert content(store, "b") == b"34"

    def test_views_of_wide_items_are_written_as_bytes(self, store: ObjectStore) -> None:
        store.put("a", [memoryview(bytes(range(16))).cast("Q"), memoryview(b"end")])
        assert content(store, "a") == bytes(range(16)) + b"end"

    def test_an_object_may_be_empty(self, store: ObjectStore) -> None:
        store.put("a", b"")
        store.put("b", [])
        store.put_if("c", b"", ABSENT)
        assert [content(store, path) for path in "abc"] == [b"", b"", b""]
        assert [row.size for row in store.list("")] == [0, 0, 0]

    def test_an_object_may_be_large(self, store: ObjectStore) -> None:
        part = bytes(range(256)) * 4096
        store.put("a", [part] * 40)
        assert store.get("a").data == part * 40
        assert bytes(store.get_range("a", len(part) * 39 - 3, 6)) == part[-3:] + part[:3]
        assert [row.size for row in store.list("")] == [len(part) * 40]

    def test_odd_names_are_names_like_others(self, store: ObjectStore) -> None:
        for number, name in enumerate(self.names):
            version = store.put_if(name, b"first", ABSENT)
            store.put_if(name, str(number).encode(), Match(version))
        assert paths(store) == sorted(self.names)
        for number, name in enumerate(self.names):
            assert content(store, name) == str(number).encode()
            assert paths(store, name) == [name]
            store.delete(name)
        assert paths(store) == []

    @pytest.mark.parametrize("path", ["a//b", "..", "a/../b", "a/./b", "nul\0"])
    def test_a_path_that_no_store_could_keep_is_refused_and_nothing_written(
        self, store: ObjectStore, path: str
    ) -> None:
        with pytest.raises(InvalidInput):
            store.put(path, b"")
        with pytest.raises(InvalidInput):
            store.put_if(path, b"", ABSENT)
        assert paths(store) == []

    def test_an_object_and_a_folder_of_one_name_coexist_or_the_second_is_refused(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        store.put("c", b"2")
        if self.nests:
            store.put("a", b"3")
            store.put("c/d", b"4")
            assert paths(store) == ["a", "a/b", "c", "c/d"]
            return
        for path in ("a", "c/d"):
            with pytest.raises(StorageError):
                store.put(path, b"3")
            with pytest.raises(StorageError):
                store.put_if(path, b"3", ABSENT)
        assert paths(store) == ["a/b", "c"]

    # --- deleting -------------------------------------------------------------------------------------------

    def test_a_deleted_object_is_gone(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        store.put("a/c", b"2")
        store.delete("a/b")
        assert paths(store) == ["a/c"]
        with pytest.raises(NotFound):
            store.get("a/b")

    def test_deleting_an_absent_object_is_fine_and_removes_nothing(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        for absent in ("other", "x/y/z", "a", "a/b/c"):
            store.delete(absent)
        assert paths(store) == ["a/b"]

    # --- conditional writes ---------------------------------------------------------------------------------

    def test_put_if_absent_creates_once(self, store: ObjectStore) -> None:
        store.put_if("a/b", b"first", ABSENT)
        with pytest.raises(AlreadyExists, match="a/b"):
            store.put_if("a/b", b"second", ABSENT)
        assert content(store, "a/b") == b"first"

    def test_put_if_absent_works_again_after_a_delete(self, store: ObjectStore) -> None:
        store.put_if("a", b"first", ABSENT)
        store.delete("a")
        store.put_if("a", b"second", ABSENT)
        assert content(store, "a") == b"second"

    def test_put_if_match_replaces_the_version_it_names(self, store: ObjectStore) -> None:
        store.put("a", b"first")
        store.put_if("a", b"second", Match(store.get("a").version))
        assert content(store, "a") == b"second"

    def test_the_returned_version_is_the_one_that_reading_gives(self, store: ObjectStore) -> None:
        created = store.put_if("a", b"first", ABSENT)
        assert store.get("a").version == created
        changed = store.put_if("a", b"second", Match(created))
        assert store.get("a").version == changed
        assert changed != created

    def test_put_if_match_of_an_outdated_version_is_a_conflict_and_changes_nothing(self, store: ObjectStore) -> None:
        outdated = store.put_if("a", b"first", ABSENT)
        store.put_if("a", b"second", Match(outdated))
        with pytest.raises(Conflict, match="a"):
            store.put_if("a", b"third", Match(outdated))
        assert content(store, "a") == b"second"

    def test_a_plain_put_outdates_a_version_too(self, store: ObjectStore) -> None:
        outdated = store.put_if("a", b"first", ABSENT)
        store.put("a", b"second")
        with pytest.raises(Conflict):
            store.put_if("a", b"third", Match(outdated))
        assert content(store, "a") == b"second"

    def test_put_if_match_of_an_object_that_is_gone_is_a_conflict(self, store: ObjectStore) -> None:
        version = store.put_if("folder/a", b"first", ABSENT)
        store.delete("folder/a")
        with pytest.raises(Conflict):
            store.put_if("folder/a", b"second", Match(version))
        with pytest.raises(Conflict):
            store.put_if("never/was", b"second", Match(version))
        assert paths(store) == []

    def test_of_racing_creators_exactly_one_wins(self, store: ObjectStore) -> None:
        for round_ in range(25):
            winners: list[bytes] = []

            def create(name: bytes, path: str = f"round/{round_}", winners: list[bytes] = winners) -> None:
                try:
                    store.put_if(path, name, ABSENT)
                except AlreadyExists:
                    return
                winners.append(name)

            together(*[lambda name=name: create(name) for name in (b"a", b"b", b"c", b"d")])
            assert winners == [content(store, f"round/{round_}")]

    def test_of_racing_updates_of_one_version_exactly_one_wins(self, store: ObjectStore) -> None:
        version = store.put_if("a", b"start", ABSENT)
        for round_ in range(25):
            winners: list[tuple[bytes, Version]] = []

            def update(name: bytes, version: Version, winners: list[tuple[bytes, Version]] = winners) -> None:
                try:
                    changed = store.put_if("a", name, Match(version))
                except Conflict:
                    return
                winners.append((name, changed))

            names = [f"{round_}{letter}".encode() for letter in "abcd"]
            together(*[lambda name=name, version=version: update(name, version) for name in names])
            found = store.get("a")
            assert winners == [(bytes(found.data), found.version)]
            version = found.version

    def test_racing_increments_lose_nothing(self, store: ObjectStore) -> None:
        store.put_if("counter", b"0", ABSENT)

        def increment(times: int) -> None:
            while times:
                found = store.get("counter")
                try:
                    store.put_if("counter", str(int(bytes(found.data)) + 1).encode(), Match(found.version))
                except Conflict:
                    continue
                times -= 1

        together(*[lambda: increment(self.increments // 4)] * 4)
        assert content(store, "counter") == str(self.increments).encode()

    def test_a_reader_never_sees_half_a_write(self, store: ObjectStore) -> None:
        sizes = (10, 200_000, 3_000)
        store.put("a", b"x" * sizes[0])
        over = threading.Event()

        def write() -> None:
            for number in range(60):
                size = sizes[number % 3]
                store.put("a", [bytes([number]) * (size // 2)] * 2)
            over.set()

        def read() -> None:
            while not over.is_set():
                data = content(store, "a")
                assert len(data) in sizes
                assert data == data[:1] * len(data)

        together(write, read)

    # --- listing --------------------------------------------------------------------------------------------

    def test_an_empty_store_lists_nothing(self, store: ObjectStore) -> None:
        assert paths(store) == []
        assert paths(store, "some/folder/") == []

    def test_listings_are_in_the_order_of_whole_paths(self, store: ObjectStore) -> None:
        names = ["a-b", "a.c", "a/b", "a/b-c/d", "a/b.c", "a/c/d", "a0", "a~", "A/z", "b", "b-", "é", "z/é"]
        for name in names:
            store.put(name, b"")
        assert paths(store) == sorted(names)
        assert paths(store)[:6] == ["A/z", "a-b", "a.c", "a/b", "a/b-c/d", "a/b.c"]

    def test_a_listing_has_sizes(self, store: ObjectStore) -> None:
        for size in (0, 1, 5000):
            store.put(f"size/{size}", b"x" * size)
        assert [(row.path, row.size) for row in store.list("size/")] == [
            ("size/0", 0),
            ("size/1", 1),
            ("size/5000", 5000),
        ]

    def test_a_listing_says_when_an_object_was_last_written(self, store: ObjectStore) -> None:
        store.put("a", b"first")
        store.put("b", b"")
        (first,) = store.list("a")
        assert abs(first.modified - CLOCK.now()) < 3600 * 1_000_000  # the store's clock may differ from ours
        store.put_if("a", b"second", Match(store.get("a").version))
        store.put("b", b"second")
        assert all(row.modified >= first.modified for row in store.list(""))

    def test_a_prefix_need_not_be_a_whole_segment(self, store: ObjectStore) -> None:
        for name in ("log/00", "log/01", "log/10", "log/1/x", "logs/02", "lo", "other/log/03"):
            store.put(name, b"")
        assert paths(store, "log/0") == ["log/00", "log/01"]
        assert paths(store, "log/1") == ["log/1/x", "log/10"]
        assert paths(store, "log") == ["log/00", "log/01", "log/1/x", "log/10", "logs/02"]
        assert paths(store, "log/") == ["log/00", "log/01", "log/1/x", "log/10"]
        assert paths(store, "log/00") == ["log/00"]
        assert paths(store, "log/00/") == []
        assert paths(store, "nothing/like/it") == []

    def test_start_after_leaves_out_all_up_to_and_with_it(self, store: ObjectStore) -> None:
        names = sorted(["a", "b/1", "b/2", "b/2/x" if self.nests else "b/2x", "b/3", "b0", "c/1"])
        for name in names:
            store.put(name, b"")
        for after in (*names, "b", "b/", "b/15", "b/2/", "b/9", "0", "zzz"):
            assert paths(store, "", after) == [name for name in names if name > after]
            assert paths(store, "b/", after) == [name for name in names if name > after and name[:2] == "b/"]

    def test_a_listing_of_many_pages_is_whole_and_in_order(self, store: ObjectStore) -> None:
        names = [f"page/{number:06}" for number in range(self.many)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: store.put(name, b""), reversed(names)))
        assert paths(store, "page/") == names
        assert paths(store, "page/", names[999]) == names[1000:]
        assert paths(store, "page/0010") == [name for name in names if name.startswith("page/0010")]

    def test_a_listing_can_be_left_halfway(self, store: ObjectStore) -> None:
        for name in "abc":
            store.put(name, b"")
        assert next(iter(store.list(""))).path == "a"
        assert paths(store) == ["a", "b", "c"]

    def test_a_copy_has_the_content_and_outlives_its_source(self, store: ObjectStore) -> None:
        store.put("a/source", b"content")
        copy_object(store, "a/source", "b/copy")
        store.delete("a/source")
        assert content(store, "b/copy") == b"content"
        store.put("a/source", b"other")
        copy_object(store, "a/source", "b/copy")
        assert content(store, "b/copy") == b"other"
        store.put("a/source", b"newer")
        assert content(store, "b/copy") == b"other"
        with pytest.raises(NotFound):
            copy_object(store, "a/nothing", "b/copy")
        assert content(store, "b/copy") == b"other"

    # --- the store itself -----------------------------------------------------------------------------------

    def test_the_address_is_in_its_errors(self, store: ObjectStore) -> None:
        with pytest.raises(NotFound) as caught:
            store.get("some/object")
        assert store.url.removeprefix("file://") in str(caught.value)

    def test_a_pickled_store_opens_the_same_place_or_says_why_not(self, store: ObjectStore) -> None:
        store.put("a", b"content")
        if not self.picklable:
            with pytest.raises(InvalidInput, match="memory"):
                pickle.dumps(store)
            return
        copy: ObjectStore = pickle.loads(pickle.dumps(store))  # noqa: S301 - what was just pickled here
        assert content(copy, "a") == b"content"
        assert copy.url == store.url
        copy.put_if("a", b"changed", Match(store.get("a").version))
        assert content(store, "a") == b"changed"
