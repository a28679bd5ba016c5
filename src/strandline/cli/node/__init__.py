"""``strandline node`` and ``strandline promote``: running, looking at and looking after the nodes of a log."""
