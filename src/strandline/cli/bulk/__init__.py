"""Commands that move many records: files and other logs into a log, a log into files and snapshots."""
