"""The metadata manager: segment events of all nodes, folded into a cache of which segment holds which offset."""
