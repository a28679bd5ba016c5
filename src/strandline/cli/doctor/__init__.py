"""``strandline doctor``: whether this machine, and a place for logs, have what is needed."""
