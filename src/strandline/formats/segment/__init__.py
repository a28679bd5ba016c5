"""The cold tier as bytes: segment files, segment events, and where a cold tier is."""
