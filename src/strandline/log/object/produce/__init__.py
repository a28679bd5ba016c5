"""The write path of an object log: rows, batches, uploads, and their listing in the head."""
