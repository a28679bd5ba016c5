"""Queues of version 1: a format shared with other implementations, read and written as they do."""
