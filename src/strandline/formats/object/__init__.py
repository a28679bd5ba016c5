"""The object log as bytes: batch objects, the head and its chunks, identities and slots."""
