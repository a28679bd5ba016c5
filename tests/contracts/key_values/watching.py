"""Contract of the full watch, and of closing a watch."""

from __future__ import annotations

import threading

import pytest

from strandline.kv.contract import KeyValue
from strandline.model.keyed import EVERYTHING, Prefix, Scope, Update
from strandline.model.records import Op
from tests.contracts.key_values.hooks import (
    IN_EVERY_SCOPE,
    KEYS,
    SOON,
    Collected,
    KeyValueOwner,
    brief,
    churn,
    current,
    fill,
    fold,
    in_every_scope,
)


class WatchingContract(KeyValueOwner):
    """Every sentence about the full watch, as a test."""

    # --- the full watch -------------------------------------------------------------------------------------

    @in_every_scope
    def test_a_full_watch_gives_the_current_values_in_the_order_of_versions(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        kv.put(KEYS[0], b"2")
        kv.put(KEYS[1], b"2")
        expected = sorted((entry for entry in kv.scan() if entry.key in scope), key=lambda entry: entry.version or 0)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
        assert taken.rows == [Update(Op.PUT, *entry) for entry in expected]

    @in_every_scope
    def test_after_the_values_comes_listed_once_and_then_changes(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            assert taken.listed is not None
            assert taken.listed.next > max(row.version or 0 for row in taken.rows)
            fill(kv, b"2")
            kv.put(IN_EVERY_SCOPE, b"last")
            taken.until_key(IN_EVERY_SCOPE, b"last")
        wanted = [(key, b"2") for key in KEYS if key in scope]
        assert brief(taken.since_listed()) == [*wanted, (IN_EVERY_SCOPE, b"last")]

    @in_every_scope
    def test_listed_comes_for_an_empty_key_value_store_and_for_an_empty_scope(self, kv: KeyValue, scope: Scope) -> None:
        with kv.watch(scope) as subscription:
            assert Collected(subscription).until_listed().rows == []
        kv.put(b"zzz", b"1")
        with kv.watch(Prefix("node.", "no")) as subscription:
            assert Collected(subscription).until_listed().rows == []

    @in_every_scope
    def test_removed_keys_are_not_among_the_current_values(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        for key in KEYS[::2]:
            kv.delete(key)
        kv.purge(KEYS[1])
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
        assert {row.key for row in taken.rows} == {key for key in KEYS[3::2] if key in scope}

    def test_listed_comes_when_all_keys_were_removed(self, kv: KeyValue) -> None:
        fill(kv)
        for key in KEYS:
            kv.delete(key)
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed()
            assert taken.rows == []
            kv.put(b"node.1", b"back")
            taken.until_key(b"node.1", b"back")

    def test_overlapping_prefixes_deliver_once(self, kv: KeyValue) -> None:
        scope = Prefix("node.1", "node.", "no", "node.1.x")
        kv.put(b"node.1.x", b"1")
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            kv.put(b"node.1.x", b"2")
            kv.put(b"node.1", b"last")
            taken.until_key(b"node.1", b"last")
        assert brief(taken.rows) == [(b"node.1.x", b"1"), (b"node.1.x", b"2"), (b"node.1", b"last")]

    @in_every_scope
    def test_changes_carry_their_operation_value_and_version(self, kv: KeyValue, scope: Scope) -> None:
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            one = kv.create(b"node.1", b"1")
            two = kv.update(b"node.1", b"", one)
            kv.delete_with_version(b"node.1", two)
            three = kv.create(b"node.1", b"3")
            kv.delete(b"node.1")
            kv.put(b"node.1.x", b"last")
            taken.until_key(b"node.1.x", b"last")
        whole = [(Op.PUT, b"1"), (Op.PUT, b""), (Op.DELETE, None), (Op.PUT, b"3"), (Op.DELETE, None), (Op.PUT, b"last")]
        given = [(row.op, row.value) for row in taken.rows]
        # Superseded values may be missing, if the store keeps one value per key.
        rest = iter(whole)
        assert all(change in rest for change in given)
        assert given[-2:] == whole[-2:]
        versions = {b"1": one, b"": two, b"3": three}
        assert all(row.version == versions.get(row.value, row.version) for row in taken.rows if row.value is not None)

    def test_a_watcher_gets_a_removal_as_it_happens(self, kv: KeyValue) -> None:
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed()
            for change, op in ((kv.delete, Op.DELETE), (kv.purge, Op.PURGE)):
                kv.put(b"node.1", b"1")
                taken.until(lambda: taken.rows and taken.rows[-1].value == b"1")
                change(b"node.1")
                taken.until(lambda: taken.rows[-1].value is None)
                assert taken.rows[-1][:3] == (op, b"node.1", None)

    @in_every_scope
    def test_changes_during_the_initial_values_are_delivered_too(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription)
            taken.take(1)
            for key in KEYS[::2]:
                kv.put(key, b"2")
            kv.delete(b"node.10")
            kv.put(b"node.1.y", b"new")
            kv.put(IN_EVERY_SCOPE, b"last")
            taken.until_key(IN_EVERY_SCOPE, b"last").until_listed()
        assert fold(taken.rows) == {key: value for key, value in current(kv).items() if key in scope}

    # --- taking and closing ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("most", [1, 3, 7])
    def test_no_more_is_given_than_was_asked_for(self, kv: KeyValue, most: int) -> None:
        fill(kv)
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed(most)
            made = churn(kv, 8)
            taken.until_key(made[-1].key, made[-1].value, most)
        assert brief(taken.rows) == [*((key, b"1") for key in KEYS), *brief(made)]

    @in_every_scope
    def test_none_is_given_if_nothing_comes_in_time(self, kv: KeyValue, scope: Scope) -> None:
        fill(kv)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            # A cursor update may still arrive, and then nothing.
            assert [taken.take(timeout=timeout) for timeout in (0, 0.01, 0, 0.01, 0)][-1] is False
            assert taken.since_listed() == []

    @in_every_scope
    def test_a_change_ends_the_wait(self, kv: KeyValue, scope: Scope) -> None:
        with kv.watch(scope) as subscription:
            taken = Collected(subscription).until_listed()
            writer = threading.Timer(0.05, lambda: kv.put(IN_EVERY_SCOPE, b"1"))
            writer.start()
            while not taken.rows:
                assert taken.take(timeout=SOON), "the wait went on although a change had come"
            writer.join()
        assert brief(taken.rows) == [(IN_EVERY_SCOPE, b"1")]

    def test_closing_twice_is_fine(self, kv: KeyValue) -> None:
        fill(kv)
        for subscription in (kv.watch(), kv.watch(Prefix("no")), kv.watch_from(EVERYTHING, None)):
            subscription.take(1, SOON)
            subscription.close()
            subscription.close()
            with subscription:
                pass

    def test_watches_do_not_take_from_each_other(self, kv: KeyValue) -> None:
        fill(kv)
        with kv.watch() as one, kv.watch(Prefix("node.")) as two, kv.watch() as closed:
            closed.close()
            first, second = Collected(one).until_listed(), Collected(two).until_listed()
            kv.put(b"node.1", b"2")
            kv.put(b"node.1.x", b"last")
            for taken in (first, second):
                taken.until_key(b"node.1.x", b"last")
                assert brief(taken.since_listed()) == [(b"node.1", b"2"), (b"node.1.x", b"last")]
