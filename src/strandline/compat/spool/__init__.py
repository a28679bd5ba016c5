"""Spools of older versions: one file of frames and its slots; and the log API numbered by lsn."""
