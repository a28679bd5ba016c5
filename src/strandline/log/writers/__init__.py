"""Numbered writers: an append that is repeated is recognised by its writer and number."""
