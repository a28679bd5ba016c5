"""Nodes over Arrow Flight: the server of a node, and the clients of its replicas and applications."""
