"""``strandline doctor``: checks this machine, and an address for logs."""
