"""Pure parts of the protocol: offsets, producers, content, and the notations of whole records."""
