"""Reading, writing and listing."""
# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strandline.errors import AlreadyExists, Conflict, InvalidInput, StorageError
from strandline.kv.contract import KeyValue, Reader, Subscription, Watcher, Writer
from strandline.model.keyed import Entry, Prefix, Scope, Update
from strandline.model.records import Op
from strandline.testing.key_values.owner import (
    IN_EVERY_SCOPE,
    KEYS,
    STRANGE,
    Collected,
    KeyValueOwner,
    brief,
    churn,
    current,
    fill,
    fold,
    in_every_scope,
)
from strandline.testing.stores import together


class ReadingContract(KeyValueOwner):
    """Every sentence about readers and writers, as a test."""

    # --- reading and writing --------------------------------------------------------------------------------

    def test_it_satisfies_the_protocols(self, bucket: KeyValue) -> None:
        assert all(isinstance(bucket, side) for side in (Reader, Writer, Watcher, KeyValue))
        with bucket.watch() as subscription:
            assert isinstance(subscription, Subscription)

    def test_a_new_bucket_is_empty(self, bucket: KeyValue) -> None:
        assert bucket.keys() == []
        assert list(bucket.scan()) == []
        assert bucket.listing().live == frozenset()
        assert not bucket.listing().deleted

    def test_an_absent_key_has_neither_value_nor_entry(self, bucket: KeyValue) -> None:
        fill(bucket)
        assert bucket.get(b"absent") is None
        assert bucket.entry(b"absent") is None
        assert bucket.get(b"nod") is None

    def test_a_value_is_read_back_with_the_version_that_put_returned(self, bucket: KeyValue) -> None:
        version = bucket.put(b"node.1", b"up")
        assert bucket.get(b"node.1") == b"up"
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"up", version)

    def test_text_stands_for_its_bytes(self, bucket: KeyValue) -> None:
        version = bucket.put("node.1", b"up")
        assert bucket.get("node.1") == bucket.get(b"node.1") == b"up"
        assert bucket.entry("node.1") == Entry(b"node.1", b"up", version)
        assert bucket.keys("node.") == [b"node.1"]
        assert [entry.key for entry in bucket.scan("no")] == [b"node.1"]
        bucket.update("node.1", b"down", version)
        bucket.delete("node.1")
        bucket.create("node.1", b"again")
        bucket.purge("node.1")
        assert bucket.keys() == []

    @pytest.mark.parametrize("key", [None, 7, ["node"], "\ud800"], ids=["None", "number", "list", "surrogate"])
    def test_a_key_or_prefix_that_is_neither_bytes_nor_text_is_refused_and_changes_nothing(
        self, bucket: KeyValue, key: Any
    ) -> None:
        version = bucket.put("a", b"1")
        for call in (
            lambda: bucket.get(key),
            lambda: bucket.entry(key),
            lambda: bucket.keys(key),
            lambda: list(bucket.scan(key)),
            lambda: bucket.put(key, b"2"),
            lambda: bucket.create(key, b"2"),
            lambda: bucket.update(key, b"2", version),
            lambda: bucket.delete(key),
            lambda: bucket.purge(key),
            lambda: bucket.delete_with_version(key, version),
            lambda: bucket.watch(Prefix(key)),
        ):
            with pytest.raises(InvalidInput, match="bytes"):
                call()
        assert list(bucket.scan()) == [Entry(b"a", b"1", version)]

    @pytest.mark.parametrize("value", ["text", None, 7, [b"1"]], ids=["text", "None", "a number", "a list"])
    def test_a_value_that_is_not_bytes_is_refused_and_no_watcher_hears_of_it(
        self, bucket: KeyValue, value: Any
    ) -> None:
        version = bucket.put("a", b"1")
        calls: list[Callable[[], object]] = [
            lambda: bucket.put("a", value),
            lambda: bucket.create("b", value),
            lambda: bucket.update("a", value, version),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match="bytes"):
                call()
        assert list(bucket.scan()) == [Entry(b"a", b"1", version)]
        with bucket.watch() as subscription:
            assert [row.value for row in Collected(subscription).until_listed().rows] == [b"1"]

    @pytest.mark.parametrize("kind", [bytearray, memoryview])
    def test_other_kinds_of_bytes_are_kept_as_they_were_at_the_call(self, bucket: KeyValue, kind: Any) -> None:
        under = bytearray(b"node.1"), bytearray(b"up")
        bucket.put(kind(under[0]), kind(under[1]))
        under[0][:], under[1][:] = b"other.", b"no"
        entry = bucket.entry(memoryview(b"node.1"))  # type: ignore[arg-type]
        assert entry is not None
        assert (type(entry.key), type(entry.value)) == (bytes, bytes)
        assert [(entry.key, entry.value) for entry in bucket.scan()] == [(b"node.1", b"up")]

    def test_later_versions_are_higher_over_all_keys(self, bucket: KeyValue) -> None:
        versions = [bucket.put(key, b"1") for key in (*KEYS, *KEYS)]
        assert versions == sorted(set(versions))
        later = bucket.update(KEYS[0], b"2", versions[len(KEYS)])
        assert later > versions[-1]
        bucket.delete(KEYS[0])
        assert bucket.create(KEYS[0], b"3") > later

    @pytest.mark.parametrize("value", [b"", b"\x00", b"\xff" * 3, b"a\r\nb", b"x" * 100_000])
    def test_any_value_round_trips(self, bucket: KeyValue, value: bytes) -> None:
        version = bucket.put(b"node.1", value)
        assert bucket.get(b"node.1") == value
        assert bucket.entry(b"node.1") == Entry(b"node.1", value, version)
        assert list(bucket.scan()) == [Entry(b"node.1", value, version)]
        with bucket.watch() as subscription:
            taken = Collected(subscription).until_listed()
            assert taken.rows == [Update(Op.PUT, b"node.1", value, version)]
            bucket.put(b"node.10", value)
            taken.until(taken.since_listed)
            assert brief(taken.since_listed()) == [(b"node.10", value)]

    def test_an_empty_value_is_present(self, bucket: KeyValue) -> None:
        version = bucket.create(b"node.1", b"")
        assert bucket.get(b"node.1") == b""
        assert bucket.keys() == [b"node.1"]
        assert bucket.listing().live == {b"node.1"}
        with pytest.raises(AlreadyExists):
            bucket.create(b"node.1", b"other")
        assert bucket.update(b"node.1", b"", version) > version

    def test_keys_are_sorted_and_cut_by_byte_prefix(self, bucket: KeyValue) -> None:
        fill(bucket, keys=reversed(KEYS))
        assert bucket.keys() == sorted(KEYS)
        for prefix in (b"no", b"node", b"node.", b"node.1", b"node.1.x", b"node.1.xy", b"a.", b"zzz"):
            assert bucket.keys(prefix) == sorted(key for key in KEYS if key.startswith(prefix))

    def test_a_scan_gives_sorted_entries_with_their_versions(self, bucket: KeyValue) -> None:
        versions = fill(bucket, keys=reversed(KEYS))
        expected = [Entry(key, b"1", versions[key]) for key in sorted(KEYS)]
        assert list(bucket.scan()) == expected
        assert list(bucket.scan(b"node")) == [entry for entry in expected if entry.key.startswith(b"node")]

    @pytest.mark.parametrize("prefix", [b"\xff", b"\x00", b"no*", b"*.", b">", b"a b.", b".", "ü".encode()])
    def test_any_bytes_may_be_a_prefix(self, bucket: KeyValue, prefix: bytes) -> None:
        fill(bucket)
        assert bucket.keys(prefix) == []
        assert list(bucket.scan(prefix)) == []
        assert bucket.listing(Prefix(prefix)).live == frozenset()
        with bucket.watch(Prefix(prefix)) as subscription:
            taken = Collected(subscription).until_listed()
        assert taken.rows == []
        with bucket.watch(Prefix(prefix, b"node.")) as subscription:
            taken = Collected(subscription).until_listed()
        assert fold(taken.rows).keys() == {key for key in KEYS if key.startswith(b"node.")}

    @pytest.mark.parametrize("key", STRANGE)
    def test_strange_keys_work_or_are_refused(self, bucket: KeyValue, key: bytes) -> None:
        if self.any_bytes:
            version = bucket.put(key, b"1")
            assert list(bucket.scan(key)) == [Entry(key, b"1", version)]
            with bucket.watch(Prefix(key)) as subscription:
                assert Collected(subscription).until_listed().rows == [Update(Op.PUT, key, b"1", version)]
            return
        for refused in (
            lambda: bucket.put(key, b"1"),
            lambda: bucket.create(key, b"1"),
            lambda: bucket.update(key, b"1", 1),
            lambda: bucket.delete(key),
            lambda: bucket.delete_with_version(key, 1),
            lambda: bucket.purge(key),
        ):
            with pytest.raises(InvalidInput):
                refused()
        # It cannot be there, and asking is no mistake.
        assert bucket.get(key) is None
        assert bucket.entry(key) is None
        assert bucket.keys() == []

    # --- deleting -------------------------------------------------------------------------------------------

    def test_a_deleted_key_is_absent(self, bucket: KeyValue) -> None:
        fill(bucket)
        bucket.delete(b"node.1")
        assert bucket.get(b"node.1") is None
        assert bucket.entry(b"node.1") is None
        assert bucket.keys(b"node.1") == [b"node.1.x", b"node.10"]
        assert b"node.1" not in current(bucket)

    def test_a_purged_key_is_absent(self, bucket: KeyValue) -> None:
        fill(bucket)
        bucket.put(b"node.1", b"2")
        bucket.purge(b"node.1")
        assert bucket.get(b"node.1") is None
        assert bucket.entry(b"node.1") is None
        assert current(bucket).keys() == set(KEYS) - {b"node.1"}

    def test_deleting_or_purging_an_absent_key_is_fine(self, bucket: KeyValue) -> None:
        bucket.delete(b"node.1")
        bucket.purge(b"node.10")
        bucket.delete(b"node.1")
        bucket.purge(b"node.1")
        assert bucket.keys() == []

    def test_a_deleted_or_purged_key_can_be_put_again(self, bucket: KeyValue) -> None:
        fill(bucket)
        bucket.delete(b"node.1")
        bucket.purge(b"node.10")
        bucket.put(b"node.1", b"2")
        bucket.put(b"node.10", b"2")
        assert bucket.get(b"node.1") == bucket.get(b"node.10") == b"2"
        assert bucket.keys() == sorted(KEYS)

    # --- conditional writing --------------------------------------------------------------------------------

    def test_create_sets_an_absent_key(self, bucket: KeyValue) -> None:
        version = bucket.create(b"node.1", b"1")
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"1", version)

    def test_create_of_a_present_key_changes_nothing(self, bucket: KeyValue) -> None:
        version = bucket.put(b"node.1", b"1")
        with pytest.raises(AlreadyExists):
            bucket.create(b"node.1", b"2")
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"1", version)

    def test_create_works_again_after_a_delete_and_after_a_purge(self, bucket: KeyValue) -> None:
        for remove in (bucket.delete, bucket.purge, bucket.delete):
            bucket.create(b"node.1", b"1")
            with pytest.raises(AlreadyExists):
                bucket.create(b"node.1", b"2")
            remove(b"node.1")
        version = bucket.create(b"node.1", b"3")
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"3", version)

    def test_of_many_who_create_one_key_exactly_one_wins(self, bucket: KeyValue) -> None:
        for attempt in range(5):
            won: list[bytes] = []

            def contend(name: bytes, won: list[bytes] = won) -> None:
                try:
                    bucket.create(b"node.1", name)
                except AlreadyExists:
                    return
                won.append(name)

            together(*(lambda name=b"%d" % number: contend(name) for number in range(6)))
            assert won == [bucket.get(b"node.1")]
            if attempt % 2:
                bucket.purge(b"node.1")
            else:
                bucket.delete(b"node.1")

    def test_update_sets_the_value_of_the_expected_version(self, bucket: KeyValue) -> None:
        version = bucket.put(b"node.1", b"1")
        fill(bucket, keys=KEYS[1:])
        later = bucket.update(b"node.1", b"2", version)
        assert later > version
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"2", later)

    def test_update_of_another_version_is_a_conflict_and_changes_nothing(self, bucket: KeyValue) -> None:
        stale = bucket.put(b"node.1", b"1")
        version = bucket.put(b"node.1", b"2")
        other = bucket.put(b"node.10", b"2")
        for wrong in (stale, other, version + 1000, 0, -1):
            if wrong == version:
                continue
            with pytest.raises(Conflict):
                bucket.update(b"node.1", b"3", wrong)
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"2", version)

    def test_update_of_an_absent_key_is_a_conflict(self, bucket: KeyValue) -> None:
        for version in (0, 1, 7):
            with pytest.raises(Conflict):
                bucket.update(b"node.1", b"1", version)
        assert bucket.keys() == []

    @pytest.mark.parametrize("how", ["delete", "purge"])
    def test_a_removed_key_has_no_version_that_could_be_expected(self, bucket: KeyValue, how: str) -> None:
        version = bucket.put(b"node.1", b"1")
        with bucket.watch() as subscription:
            taken = Collected(subscription).until_listed()
            getattr(bucket, how)(b"node.1")
            taken.until_key(b"node.1", None)
        removal = taken.rows[-1].version
        for expected in (version, removal, 0):
            if expected is not None:
                with pytest.raises(Conflict):
                    bucket.update(b"node.1", b"2", expected)
                with pytest.raises(Conflict):
                    bucket.delete_with_version(b"node.1", expected)
        assert bucket.entry(b"node.1") is None

    def test_of_many_who_update_one_version_exactly_one_wins(self, bucket: KeyValue) -> None:
        version = bucket.put(b"node.1", b"0")
        won: list[bytes] = []

        def contend(name: bytes) -> None:
            try:
                bucket.update(b"node.1", name, version)
            except Conflict:
                return
            won.append(name)

        together(*(lambda name=b"%d" % number: contend(name) for number in range(6)))
        assert won == [bucket.get(b"node.1")]

    def test_delete_with_version_removes_the_expected_version(self, bucket: KeyValue) -> None:
        version = bucket.put(b"node.1", b"1")
        fill(bucket, keys=KEYS[1:])
        bucket.delete_with_version(b"node.1", version)
        assert bucket.get(b"node.1") is None
        assert bucket.keys() == sorted(KEYS[1:])

    def test_delete_with_another_version_is_a_conflict_and_changes_nothing(self, bucket: KeyValue) -> None:
        stale = bucket.put(b"node.1", b"1")
        version = bucket.put(b"node.1", b"2")
        for wrong in (stale, version + 1000, -1):
            with pytest.raises(Conflict):
                bucket.delete_with_version(b"node.1", wrong)
        with pytest.raises(Conflict):
            bucket.delete_with_version(b"absent", version)
        assert bucket.entry(b"node.1") == Entry(b"node.1", b"2", version)

    # --- listing --------------------------------------------------------------------------------------------

    @in_every_scope
    def test_a_listing_tells_the_live_keys_in_scope(self, bucket: KeyValue, scope: Scope) -> None:
        fill(bucket)
        bucket.delete(b"node.10")
        bucket.delete(b"other")
        bucket.purge(b"route.a")
        bucket.put(b"other", b"again")
        listing = bucket.listing(scope)
        assert listing.live == {key for key in KEYS if key in scope and key not in (b"node.10", b"route.a")}
        if listing.deleted is not None:
            assert listing.deleted == {key for key in (b"node.10", b"route.a") if key in scope}

    @in_every_scope
    def test_an_evicted_key_is_neither_live_nor_deleted(self, bucket: KeyValue, scope: Scope) -> None:
        fill(bucket)
        bucket.delete(b"node.10")
        if not self.evict(bucket, IN_EVERY_SCOPE):
            return
        assert bucket.get(IN_EVERY_SCOPE) is None
        listing = bucket.listing(scope)
        assert IN_EVERY_SCOPE not in listing.live
        assert IN_EVERY_SCOPE not in (listing.deleted or ())

    def test_a_listing_is_whole_or_an_error(self, bucket: KeyValue) -> None:
        churn(bucket, 60)
        failing = self.failing_listings(bucket)
        if failing is None:
            return
        with failing:
            for listing in (
                bucket.keys,
                lambda: bucket.keys(b"node."),
                lambda: list(bucket.scan()),
                lambda: list(bucket.scan(b"no")),
                bucket.listing,
                lambda: bucket.listing(Prefix(b"node.", b"route.")),
            ):
                with pytest.raises(StorageError):
                    listing()
