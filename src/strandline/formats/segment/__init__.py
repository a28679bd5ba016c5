"""The cold tier as bytes: segment files, segment events, and the description of a cold tier."""
