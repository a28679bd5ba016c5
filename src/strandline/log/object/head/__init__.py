"""The head of an object log: pure edits of it, and the search for an offset in it."""
