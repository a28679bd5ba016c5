"""Slots, the same for every log: rules of slots, trimming and resume as pure functions; slot tables; heartbeats."""
