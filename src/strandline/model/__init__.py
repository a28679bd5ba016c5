"""Values and the error tree. No I/O."""
