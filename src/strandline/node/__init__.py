"""A node of a replicated log: what a commit has to wait for, and who is how far."""
