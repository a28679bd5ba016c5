"""Commands of the cold tier: tiering and segments."""
