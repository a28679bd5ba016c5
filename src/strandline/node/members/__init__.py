"""Membership: the nodes of a log and its commit policy, and how both change while it runs."""
