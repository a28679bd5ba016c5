"""Examples of a room whose extra is not installed are left out; everything else must import."""

from importlib.util import find_spec

ROOMS = {"pyspark": "src/strandline/spark", "typer": "src/strandline/cli"}
collect_ignore = [room for extra, room in ROOMS.items() if find_spec(extra) is None]
