"""The queue API: one consumer at a time takes batches in order and acknowledges them."""
