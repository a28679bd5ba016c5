"""Snapshots: sealed folders, their publication in an object store, and newcomers made of them."""
