"""The store in memory, against the suite that every store passes."""

from __future__ import annotations

import pytest

from strandline.errors import InvalidInput
from strandline.followers.stores.state import KeyedState, MemoryStore, change_of
from strandline.testing.keyed_stores import StoreContract
from strandline.testing.sinks import changes


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def sink(self):
        return MemoryStore()

    def test_the_error_names_the_stores_that_can_be_exported(self, store, tmp_path):
        self.apply(store, 0, (b"a", b"1"))
        with pytest.raises(InvalidInput, match="AppendLogStore"):
            store.export_to(str(tmp_path / "snapshot"))

    def test_a_closed_store_takes_nothing(self, store):
        self.apply(store, 0, (b"a", b"1"))
        store.close()
        with pytest.raises(InvalidInput, match="closed"):
            self.apply(store, 1, (b"a", b"2"))


def test_the_order_of_the_keys_is_not_made_again_when_only_values_changed():
    state = KeyedState()
    state.take(change_of(changes(0, (b"b", b"1"), (b"a", b"1"))))
    state.view(b"")
    order = state._order
    state.take(change_of(changes(2, (b"a", b"2"))))
    assert not state._stale
    assert state.view(b"") == ([b"a", b"b"], [b"2", b"1"])
    assert state._order is order
