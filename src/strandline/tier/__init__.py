"""The cold tier: closed ranges of a log as segments in object storage, and the events that tell of them."""
