"""Maintenance of tables: describe, verify against the log, rebuild, optimize, replay dead letters."""
