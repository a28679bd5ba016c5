"""The queue consumer: takes batches in order, hands them out, and acknowledges them durably."""
