"""Commands for tables that follow a log."""
