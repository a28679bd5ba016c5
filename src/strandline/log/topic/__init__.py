"""Topics: logs side by side, published to and subscribed to by partition."""
