"""Elections: which node may lead, and the votes of a quorum."""
