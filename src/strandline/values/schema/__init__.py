"""Schemas of typed values: notations, and permitted changes."""
