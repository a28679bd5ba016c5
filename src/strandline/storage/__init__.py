"""Object stores, disk, clock and chance behind small protocols, and the one compare-and-set loop."""
