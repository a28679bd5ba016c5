"""Logs over HTTP: the Durable Streams protocol at ``/v1/stream/{name}``, and records beyond it."""
