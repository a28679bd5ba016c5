"""The write-ahead log as bytes: frames, folder files, the sparse index, the durable mark."""
