"""Commands of the server: one process from one file."""
