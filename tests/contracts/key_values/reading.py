"""Contract of reads, writes and listings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strandline.errors import AlreadyExists, Conflict, InvalidInput, StorageError
from strandline.kv.contract import KeyValue, KeyValueReader, KeyValueSubscription, KeyValueWriter, Watcher
from strandline.model.keyed import KeyValueEntry, Prefix, Scope, Update
from strandline.model.records import Op
from strandline.testing.stores import together
from tests.contracts.key_values.hooks import (
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


class KeyValueReadContract(KeyValueOwner):
    """Every sentence about readers and writers, as a test."""

    # --- reading and writing --------------------------------------------------------------------------------

    def test_it_satisfies_the_protocols(self, kv: KeyValue) -> None:
        assert all(isinstance(kv, side) for side in (KeyValueReader, KeyValueWriter, Watcher, KeyValue))
        with kv.watch() as subscription:
            assert isinstance(subscription, KeyValueSubscription)

    def test_a_new_key_value_store_is_empty(self, kv: KeyValue) -> None:
        assert kv.keys() == []
        assert list(kv.scan()) == []
        assert kv.listing().live == frozenset()
        assert not kv.listing().deleted

    def test_an_absent_key_has_neither_value_nor_entry(self, kv: KeyValue) -> None:
        fill(kv)
        assert kv.get(b"absent") is None
        assert kv.entry(b"absent") is None
        assert kv.get(b"nod") is None

    def test_a_value_is_read_back_with_the_version_that_put_returned(self, kv: KeyValue) -> None:
        version = kv.put(b"node.1", b"up")
        assert kv.get(b"node.1") == b"up"
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"up", version)

    def test_text_means_its_bytes(self, kv: KeyValue) -> None:
        version = kv.put("node.1", b"up")
        assert kv.get("node.1") == kv.get(b"node.1") == b"up"
        assert kv.entry("node.1") == KeyValueEntry(b"node.1", b"up", version)
        assert kv.keys("node.") == [b"node.1"]
        assert [entry.key for entry in kv.scan("no")] == [b"node.1"]
        kv.update("node.1", b"down", version)
        kv.delete("node.1")
        kv.create("node.1", b"again")
        kv.purge("node.1")
        assert kv.keys() == []

    @pytest.mark.parametrize("key", [None, 7, ["node"], "\ud800"], ids=["None", "number", "list", "surrogate"])
    def test_a_key_or_prefix_that_is_neither_bytes_nor_text_is_refused_and_changes_nothing(
        self, kv: KeyValue, key: Any
    ) -> None:
        version = kv.put("a", b"1")
        for call in (
            lambda: kv.get(key),
            lambda: kv.entry(key),
            lambda: kv.keys(key),
            lambda: list(kv.scan(key)),
            lambda: kv.put(key, b"2"),
            lambda: kv.create(key, b"2"),
            lambda: kv.update(key, b"2", version),
            lambda: kv.delete(key),
            lambda: kv.purge(key),
            lambda: kv.delete_with_version(key, version),
            lambda: kv.watch(Prefix(key)),
        ):
            with pytest.raises(InvalidInput, match="bytes"):
                call()
        assert list(kv.scan()) == [KeyValueEntry(b"a", b"1", version)]

    @pytest.mark.parametrize("value", ["text", None, 7, [b"1"]], ids=["text", "None", "a number", "a list"])
    def test_a_value_that_is_not_bytes_is_refused_and_no_watcher_gets_it(self, kv: KeyValue, value: Any) -> None:
        version = kv.put("a", b"1")
        calls: list[Callable[[], object]] = [
            lambda: kv.put("a", value),
            lambda: kv.create("b", value),
            lambda: kv.update("a", value, version),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match="bytes"):
                call()
        assert list(kv.scan()) == [KeyValueEntry(b"a", b"1", version)]
        with kv.watch() as subscription:
            assert [row.value for row in Collected(subscription).until_listed().rows] == [b"1"]

    @pytest.mark.parametrize("kind", [bytearray, memoryview])
    def test_other_kinds_of_bytes_are_kept_as_they_were_at_the_call(self, kv: KeyValue, kind: Any) -> None:
        under = bytearray(b"node.1"), bytearray(b"up")
        kv.put(kind(under[0]), kind(under[1]))
        under[0][:], under[1][:] = b"other.", b"no"
        entry = kv.entry(memoryview(b"node.1"))  # type: ignore[arg-type]
        assert entry is not None
        assert (type(entry.key), type(entry.value)) == (bytes, bytes)
        assert [(entry.key, entry.value) for entry in kv.scan()] == [(b"node.1", b"up")]

    def test_later_versions_are_higher_over_all_keys(self, kv: KeyValue) -> None:
        versions = [kv.put(key, b"1") for key in (*KEYS, *KEYS)]
        assert versions == sorted(set(versions))
        later = kv.update(KEYS[0], b"2", versions[len(KEYS)])
        assert later > versions[-1]
        kv.delete(KEYS[0])
        assert kv.create(KEYS[0], b"3") > later

    @pytest.mark.parametrize("value", [b"", b"\x00", b"\xff" * 3, b"a\r\nb", b"x" * 100_000])
    def test_any_value_round_trips(self, kv: KeyValue, value: bytes) -> None:
        version = kv.put(b"node.1", value)
        assert kv.get(b"node.1") == value
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", value, version)
        assert list(kv.scan()) == [KeyValueEntry(b"node.1", value, version)]
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed()
            assert taken.rows == [Update(Op.PUT, b"node.1", value, version)]
            kv.put(b"node.10", value)
            taken.until(taken.since_listed)
            assert brief(taken.since_listed()) == [(b"node.10", value)]

    def test_an_empty_value_is_present(self, kv: KeyValue) -> None:
        version = kv.create(b"node.1", b"")
        assert kv.get(b"node.1") == b""
        assert kv.keys() == [b"node.1"]
        assert kv.listing().live == {b"node.1"}
        with pytest.raises(AlreadyExists):
            kv.create(b"node.1", b"other")
        assert kv.update(b"node.1", b"", version) > version

    def test_keys_are_sorted_and_cut_by_byte_prefix(self, kv: KeyValue) -> None:
        fill(kv, keys=reversed(KEYS))
        assert kv.keys() == sorted(KEYS)
        for prefix in (b"no", b"node", b"node.", b"node.1", b"node.1.x", b"node.1.xy", b"a.", b"zzz"):
            assert kv.keys(prefix) == sorted(key for key in KEYS if key.startswith(prefix))

    def test_a_scan_gives_sorted_entries_with_their_versions(self, kv: KeyValue) -> None:
        versions = fill(kv, keys=reversed(KEYS))
        expected = [KeyValueEntry(key, b"1", versions[key]) for key in sorted(KEYS)]
        assert list(kv.scan()) == expected
        assert list(kv.scan(b"node")) == [entry for entry in expected if entry.key.startswith(b"node")]

    @pytest.mark.parametrize("prefix", [b"\xff", b"\x00", b"no*", b"*.", b">", b"a b.", b".", "ü".encode()])
    def test_any_bytes_may_be_a_prefix(self, kv: KeyValue, prefix: bytes) -> None:
        fill(kv)
        assert kv.keys(prefix) == []
        assert list(kv.scan(prefix)) == []
        assert kv.listing(Prefix(prefix)).live == frozenset()
        with kv.watch(Prefix(prefix)) as subscription:
            taken = Collected(subscription).until_listed()
        assert taken.rows == []
        with kv.watch(Prefix(prefix, b"node.")) as subscription:
            taken = Collected(subscription).until_listed()
        assert fold(taken.rows).keys() == {key for key in KEYS if key.startswith(b"node.")}

    @pytest.mark.parametrize("key", STRANGE)
    def test_strange_keys_work_or_are_refused(self, kv: KeyValue, key: bytes) -> None:
        if self.any_bytes:
            version = kv.put(key, b"1")
            assert list(kv.scan(key)) == [KeyValueEntry(key, b"1", version)]
            with kv.watch(Prefix(key)) as subscription:
                assert Collected(subscription).until_listed().rows == [Update(Op.PUT, key, b"1", version)]
            return
        for refused in (
            lambda: kv.put(key, b"1"),
            lambda: kv.create(key, b"1"),
            lambda: kv.update(key, b"1", 1),
            lambda: kv.delete(key),
            lambda: kv.delete_with_version(key, 1),
            lambda: kv.purge(key),
        ):
            with pytest.raises(InvalidInput):
                refused()
        # It cannot be present, and a read is no mistake.
        assert kv.get(key) is None
        assert kv.entry(key) is None
        assert kv.keys() == []

    # --- deleting -------------------------------------------------------------------------------------------

    def test_a_deleted_key_is_absent(self, kv: KeyValue) -> None:
        fill(kv)
        kv.delete(b"node.1")
        assert kv.get(b"node.1") is None
        assert kv.entry(b"node.1") is None
        assert kv.keys(b"node.1") == [b"node.1.x", b"node.10"]
        assert b"node.1" not in current(kv)

    def test_a_purged_key_is_absent(self, kv: KeyValue) -> None:
        fill(kv)
        kv.put(b"node.1", b"2")
        kv.purge(b"node.1")
        assert kv.get(b"node.1") is None
        assert kv.entry(b"node.1") is None
        assert current(kv).keys() == set(KEYS) - {b"node.1"}

    def test_deleting_or_purging_an_absent_key_is_fine(self, kv: KeyValue) -> None:
        kv.delete(b"node.1")
        kv.purge(b"node.10")
        kv.delete(b"node.1")
        kv.purge(b"node.1")
        assert kv.keys() == []

    def test_a_deleted_or_purged_key_can_be_put_again(self, kv: KeyValue) -> None:
        fill(kv)
        kv.delete(b"node.1")
        kv.purge(b"node.10")
        kv.put(b"node.1", b"2")
        kv.put(b"node.10", b"2")
        assert kv.get(b"node.1") == kv.get(b"node.10") == b"2"
        assert kv.keys() == sorted(KEYS)

    # --- conditional writing --------------------------------------------------------------------------------

    def test_create_sets_an_absent_key(self, kv: KeyValue) -> None:
        version = kv.create(b"node.1", b"1")
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"1", version)

    def test_create_of_a_present_key_changes_nothing(self, kv: KeyValue) -> None:
        version = kv.put(b"node.1", b"1")
        with pytest.raises(AlreadyExists):
            kv.create(b"node.1", b"2")
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"1", version)

    def test_create_works_again_after_a_delete_and_after_a_purge(self, kv: KeyValue) -> None:
        for remove in (kv.delete, kv.purge, kv.delete):
            kv.create(b"node.1", b"1")
            with pytest.raises(AlreadyExists):
                kv.create(b"node.1", b"2")
            remove(b"node.1")
        version = kv.create(b"node.1", b"3")
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"3", version)

    def test_of_many_creators_of_one_key_exactly_one_wins(self, kv: KeyValue) -> None:
        for attempt in range(5):
            won: list[bytes] = []

            def contend(name: bytes, won: list[bytes] = won) -> None:
                try:
                    kv.create(b"node.1", name)
                except AlreadyExists:
                    return
                won.append(name)

            together(*(lambda name=b"%d" % number: contend(name) for number in range(6)))
            assert won == [kv.get(b"node.1")]
            if attempt % 2:
                kv.purge(b"node.1")
            else:
                kv.delete(b"node.1")

    def test_update_sets_the_value_of_the_expected_version(self, kv: KeyValue) -> None:
        version = kv.put(b"node.1", b"1")
        fill(kv, keys=KEYS[1:])
        later = kv.update(b"node.1", b"2", version)
        assert later > version
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"2", later)

    def test_update_of_another_version_is_a_conflict_and_changes_nothing(self, kv: KeyValue) -> None:
        stale = kv.put(b"node.1", b"1")
        version = kv.put(b"node.1", b"2")
        other = kv.put(b"node.10", b"2")
        for wrong in (stale, other, version + 1000, 0, -1):
            if wrong == version:
                continue
            with pytest.raises(Conflict):
                kv.update(b"node.1", b"3", wrong)
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"2", version)

    def test_update_of_an_absent_key_is_a_conflict(self, kv: KeyValue) -> None:
        for version in (0, 1, 7):
            with pytest.raises(Conflict):
                kv.update(b"node.1", b"1", version)
        assert kv.keys() == []

    @pytest.mark.parametrize("how", ["delete", "purge"])
    def test_a_removed_key_has_no_version_that_could_be_expected(self, kv: KeyValue, how: str) -> None:
        version = kv.put(b"node.1", b"1")
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed()
            getattr(kv, how)(b"node.1")
            taken.until_key(b"node.1", None)
        removal = taken.rows[-1].version
        for expected in (version, removal, 0):
            if expected is not None:
                with pytest.raises(Conflict):
                    kv.update(b"node.1", b"2", expected)
                with pytest.raises(Conflict):
                    kv.delete_with_version(b"node.1", expected)
        assert kv.entry(b"node.1") is None

    def test_of_many_updates_of_one_version_exactly_one_wins(self, kv: KeyValue) -> None:
        version = kv.put(b"node.1", b"0")
        won: list[bytes] = []

        def contend(name: bytes) -> None:
            try:
                kv.update(b"node.1", name, version)
            except Conflict:
                return
            won.append(name)

        together(*(lambda name=b"%d" % number: contend(name) for number in range(6)))
        assert won == [kv.get(b"node.1")]

    def test_delete_with_version_removes_the_expected_version(self, kv: KeyValue) -> None:
        version = kv.put(b"node.1", b"1")
        fill(kv, keys=KEYS[1:])
        kv.delete_with_version(b"node.1", version)
        assert kv.get(b"node.1") is None
        assert kv.keys() == sorted(KEYS[1:])

    def test_delete_with_another_version_is_a_conflict_and_changes_nothing(self, kv: KeyValue) -> None:
        stale = kv.put(b"node.1", b"1")
        version = kv.put(b"node.1", b"2")
        for wrong in (stale, version + 1000, -1):
            with pytest.raises(Conflict):
                kv.delete_with_version(b"node.1", wrong)
        with pytest.raises(Conflict):
            kv.delete_with_version(b"absent", version)
        assert kv.entry(b"node.1") == KeyValueEntry(b"node.1", b"2", version)

    # --- listing --------------------------------------------------------------------------------------------

    @in_every_scope
    def test_a_listing_has_the_live_keys_in_scope(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        kv.delete(b"node.10")
        kv.delete(b"other")
        kv.purge(b"route.a")
        kv.put(b"other", b"again")
        listing = kv.listing(scope)
        assert listing.live == {key for key in KEYS if key in scope and key not in (b"node.10", b"route.a")}
        if listing.deleted is not None:
            assert listing.deleted == {key for key in (b"node.10", b"route.a") if key in scope}

    @in_every_scope
    def test_an_evicted_key_is_neither_live_nor_deleted(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        kv.delete(b"node.10")
        if not self.evict(kv, IN_EVERY_SCOPE):
            return
        assert kv.get(IN_EVERY_SCOPE) is None
        listing = kv.listing(scope)
        assert IN_EVERY_SCOPE not in listing.live
        assert IN_EVERY_SCOPE not in (listing.deleted or ())

    def test_a_listing_is_whole_or_an_error(self, kv: KeyValue) -> None:
        churn(kv, 60)
        failing = self.failing_listings(kv)
        if failing is None:
            return
        with failing:
            for listing in (
                kv.keys,
                lambda: kv.keys(b"node."),
                lambda: list(kv.scan()),
                lambda: list(kv.scan(b"no")),
                kv.listing,
                lambda: kv.listing(Prefix(b"node.", b"route.")),
            ):
                with pytest.raises(StorageError):
                    listing()
