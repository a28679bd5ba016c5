"""Logs: the contract, slot rules, and the logs themselves."""
