"""Bytes and back, one module per format. Pure: hostile input gives ``CorruptData``."""
