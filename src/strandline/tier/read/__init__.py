"""Reading across tiers: segments for what the hot tier has deleted, without a gap."""
