"""Recovery of a write-ahead log: after a crash, by truncation, by repair, and the verification of all its bytes."""
