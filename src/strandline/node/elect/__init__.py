"""Elections: who may lead, votes of a quorum, and the bounds on terms."""
