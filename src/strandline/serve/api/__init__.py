"""The HTTP port of a server: health, metrics, the state as JSON with its actions, and the streams beside them."""
