"""Follows one log into many tables: one read for all of them, and a cursor and commits for each."""
