"""Routes: which records of one log go into which tables."""
