"""Protocols and implementations of object stores, disk, clock and randomness; compare-and-set, leases, metrics."""
