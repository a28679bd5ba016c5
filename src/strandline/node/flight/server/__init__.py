"""The Arrow Flight server of a node: actions, admission of calls, limits."""
