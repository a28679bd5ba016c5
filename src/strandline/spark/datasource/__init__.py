"""Spark's data source: options to spans, spans to Arrow batches, and bulk reads."""
