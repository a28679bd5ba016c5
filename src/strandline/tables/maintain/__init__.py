"""Maintenance of tables: describe, verify against the log, rebuild, compact, replay dead letters."""
