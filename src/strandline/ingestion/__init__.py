"""Ingestion: copies a log, a queue of version 1, a Kafka partition or a JetStream stream into a log, exactly once."""
