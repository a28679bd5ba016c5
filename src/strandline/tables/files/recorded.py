"""Properties of a table of data files that follows a log, and checks that Delta and Iceberg share. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.cursor import Cursor
from strandline.tables.rows.partitions import recorded_layout
from strandline.tables.rows.shape import TableShape
from strandline.values.schema.evolution import Evolution

CURSOR_KEY: Final = "strandline.cursor"
"""Part of each commit: the whole cursor."""
COMMIT_KEY: Final = "strandline.commit"
"""What identifies a commit of the sink; its value is each format's own."""
HOLDER_KEY: Final = "strandline.holder"
"""Part of each commit of a follower: the id of its run (:mod:`strandline.tables.claim`)."""
MODE_KEY: Final = "strandline.mode"
"""Property of a table: its kind."""
SHAPE_KEY: Final = "strandline.shape"
"""Property of a table: what identifies its rows, and how deletes are kept."""
START_KEY: Final = "strandline.start"
"""Property of a table: the offset at which its rows begin."""
LAYOUT_KEY: Final = "strandline.layout"
"""Property of a table that is partitioned or clustered: by what."""
TRANSFORM_KEY: Final = "strandline.transform"
"""Property of a table whose rows come from a transform."""

INFERRED_KEY: Final = "strandline.inferred"
"""Property of a table for a first look: the JSON Schema of its values, which was inferred."""

_LOGGER: Final = logging.getLogger(__name__)


def properties_at(since: Cursor, shape: TableShape) -> dict[str, str]:
    """The properties of a table that is created at a cursor. The log is under a key of each format."""
    found = {MODE_KEY: shape.kind, SHAPE_KEY: shape.recorded(), START_KEY: str(since.next)}
    if shape.transform is not None:
        found[TRANSFORM_KEY] = "true"
    if shape.layout is not None:
        found[LAYOUT_KEY] = shape.layout.recorded()
    if shape.inferred is not None:
        found[INFERRED_KEY] = shape.inferred
    return found


def check_recorded(properties: Mapping[str, str], shape: TableShape, where: str) -> None:
    """``InvalidInput`` if the table was made with another mode, shape or partitions."""
    check_recorded_files(properties, shape, where)
    recorded = properties.get(SHAPE_KEY, shape.recorded())
    if recorded != shape.recorded():  # rows would be doubled
        raise InvalidInput(
            f"The table {where} was made with {recorded}, and is opened with {shape.recorded()}: open it as it was "
            "made, or build a new one."
        )


def check_recorded_files(properties: Mapping[str, str], shape: TableShape, where: str) -> None:
    """``InvalidInput`` for another mode or other partitions, which say how files are used; their order may change."""
    mode = properties.get(MODE_KEY)
    if mode != shape.kind:
        raise InvalidInput(f"The table {where} was made with mode {mode!r}: open it with that.")
    recorded = recorded_layout(properties.get(LAYOUT_KEY))
    made = [] if recorded is None else list(recorded.partition_by)
    now = [] if shape.layout is None else [str(field) for field in shape.layout.fields]
    if made != now:
        raise InvalidInput(
            f"The table {where} was made with the partitions {made}, and is opened with {now}: open it as it was made, "
            "or follow the log into a new table with the other layout."
        )


CHANGE_KEY: Final = "strandline.change"
"""Key in a table's history of what a commit did besides appending and merging rows."""


def told_change(change: Evolution, where: str) -> str:
    """A change of columns, for the table's history; it is logged, too."""
    kinds = (("new columns", change.added), ("wider columns", change.widened))
    named = [(kind, ", ".join(f"{field.name} ({field.type})" for field in fields)) for kind, fields in kinds]
    told = "; ".join(f"{kind}: {fields}" for kind, fields in named if fields)
    _LOGGER.warning("The columns of the table %s change: %s.", where, told)
    return told


def told_rebuild(start: int, upto: Cursor) -> str:
    """A rebuild, for the table's history."""
    return f"all rows built again from offset {start} up to {upto.next}"
