"""A key-value bucket in NATS JetStream."""
