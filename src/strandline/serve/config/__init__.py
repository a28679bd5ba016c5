"""The file of a server: its settings, where each is written, and what changes without a restart."""
