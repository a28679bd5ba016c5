"""Stores: keyed state with its cursor, in memory, in an append-only file, or in RocksDB."""
