"""Nodes as bytes: the node's state file, tickets, and messages beside Arrow batches."""
