"""``strandline wal``: looking at, checking, repairing and moving a write-ahead log."""
