"""Maintenance of an object log: garbage collection, slot lag, verification."""
