"""Keyed values that can be watched: the contract, and its backends."""
