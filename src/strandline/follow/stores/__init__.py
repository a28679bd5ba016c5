"""Folds that can be read: sinks that keep keyed state in step with a stream of changes."""
