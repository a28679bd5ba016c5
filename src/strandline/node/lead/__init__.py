"""The primary: orders records, tracks the durable offset of each replica, and decides what is committed."""
