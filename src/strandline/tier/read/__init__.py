"""Reading across tiers: segments for records that the hot tier has trimmed, without a gap."""
