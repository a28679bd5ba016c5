"""Codecs between value bytes and Arrow columns."""
