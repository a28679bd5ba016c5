"""Watches: apply the changes of a key-value bucket to a store, with resync after expiry and a supervisor."""
