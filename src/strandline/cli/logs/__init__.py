"""Commands on a log: produce, tail, slots, verify and others."""
