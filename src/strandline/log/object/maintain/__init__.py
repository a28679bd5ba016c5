"""Maintenance of an object log: trimming, slot lag, verification."""
