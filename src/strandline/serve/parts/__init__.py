"""The parts of a server, each supervised: logs and their rounds, ingests, tables, snapshots."""
