"""Nodes as bytes: what a node remembers, tickets, and messages beside Arrow batches."""
