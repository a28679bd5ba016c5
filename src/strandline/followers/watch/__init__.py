"""Watches: apply the changes of a key-value store to a store, with resync after expiry and a supervisor."""
