"""Values that all packages share: records, cursors, slots, segments; the protocols of sinks and stores. No I/O."""
