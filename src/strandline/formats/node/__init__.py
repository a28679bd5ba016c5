"""Nodes as bytes: the node's state file, tickets, and messages that accompany Arrow batches."""
