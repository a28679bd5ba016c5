"""Clients of a node over Arrow Flight: those of replicas, and those of applications."""
