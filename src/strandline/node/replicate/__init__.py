"""The replica: receives batches, appends them to its copy, acknowledges them, and bootstraps when it must."""
