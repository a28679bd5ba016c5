"""Benchmarks: ratios measured side by side in one run. ``make bench``, or ``make bench ONLY=name``."""
