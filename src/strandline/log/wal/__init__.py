"""A log on this machine's own disk: durable when an append returns, one writing process, any number of readers."""
