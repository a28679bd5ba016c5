"""Calls: arguments that a signature does not have, and calls that some kinds of logs lack."""
