"""Nodes over Arrow Flight: the server around a node, and its replicas' and clients' side of it."""
