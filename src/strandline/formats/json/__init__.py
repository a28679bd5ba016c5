"""Small JSON documents: read field by field within bounds, or under a checksum."""
