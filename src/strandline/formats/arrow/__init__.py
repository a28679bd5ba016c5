"""Arrow IPC in stored data: headers checked before Arrow reads them, blocks with checksums."""
