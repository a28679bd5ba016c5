"""Snapshots as bytes: the manifest of a sealed folder, and the pointer to the newest."""
