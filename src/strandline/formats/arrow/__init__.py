"""Arrow IPC inside our formats: headers judged before Arrow reads them, blocks with checksums."""
