"""Producing, the same for every log: rows, batches, their order; a shipper sends them to the log."""
