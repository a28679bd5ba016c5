"""The write path of a write-ahead log: group commit into the active file."""
