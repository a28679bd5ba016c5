"""``strandline tier`` and ``strandline segments``: the cold tier of a log."""
