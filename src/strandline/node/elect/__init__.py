"""Elections: who may lead, and the votes of a quorum."""
