"""Followers of a log: the engine, sinks and stores that move their cursor only after apply, watches, the consumer."""
