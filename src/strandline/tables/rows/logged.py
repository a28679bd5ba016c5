"""``value="log"``: a table whose codec is the one that its log names, in the newest version at each commit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Self, TypeAlias

import pyarrow as pa

from strandline.errors import InvalidInput, SchemaRefused
from strandline.log.read.value_format import named_codec
from strandline.tables.rows.kinds import TYPED, Mode
from strandline.tables.rows.partitions import Layout, layout_of
from strandline.tables.rows.shape import ArrowTransform, TableShape
from strandline.tables.rows.tombstones import Tombstones
from strandline.values.contract import Codec

Value: TypeAlias = Codec | Literal["log"]
"""The codec of a table's values: a codec, or the one that the log names."""

_LOGGER: Final = logging.getLogger(__name__)


class LoggedShape:
    """The shape of a table, resolved with the codec that its log names.

    A table that has the record's own columns keeps them, also when its log names a codec later: the columns of an
    existing table never change their meaning by themselves.
    """

    def __init__(self, shape: TableShape, value: Value | None, where: str) -> None:
        """``shape`` has no codec if ``value`` is ``"log"``."""
        if isinstance(value, str) and value != "log":
            raise InvalidInput(f"value is a codec, or 'log' for the one that the log names, not {value!r}.")
        self.is_logged = value == "log"
        self._shape = shape
        self._where = where
        self._log: object = None
        self._has_warned = False
        self._is_frozen = False

    def meet(self, log: object) -> None:
        """Remember the log that the table follows."""
        self._log = log

    def check_met(self) -> None:
        """``InvalidInput`` if the log is needed and not known yet."""
        if self.is_logged and self._log is None:
            raise InvalidInput(
                f"The table {self._where} has value='log', and its log is not known yet: pass the sink to sl.follow, "
                "or call its meet(log) first."
            )

    def frozen(self, shape: TableShape) -> Self:
        """A copy with a fixed shape, for rows that another engine transforms, as long as the log keeps its codec."""
        twin = copy.copy(self)
        twin._shape, twin._is_frozen = shape, True  # noqa: SLF001 - a copy of this object
        return twin

    def reshaped(self, **changes: Any) -> None:
        """Change fields of the shape, before the table is followed."""
        self._shape = replace(self._shape, **changes)

    def resolved(self, columns: Callable[[], pa.Schema | None]) -> TableShape:
        """The shape now, for a table with these columns, if there is one; ``InvalidInput`` before it met its log."""
        if not self.is_logged:
            return self._shape
        self.check_met()
        codec = named_codec(self._log)
        if codec is not None and not len(codec.schema):
            raise InvalidInput(
                f"The log of the table {self._where} names the codec {codec!r:.100}, which has no columns: record a "
                "schema with the log's evolve_value, or give the sink a codec."
            )
        if self._is_frozen:
            now, then = (None if one is None else (one.name, one.schema) for one in (codec, self._shape.value))
            if now != then:
                raise SchemaRefused(
                    f"The log of the table {self._where} names a new version of its codec, and the transform was "
                    "applied to the columns of the former one: start the pipeline again. Nothing was skipped."
                )
            return self._shape
        if codec is not None and self._shape.transform is None and is_raw(columns()):
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(
                    "The table %s keeps the columns of records, though its log names a codec by now: follow into a new "
                    "table to have the value's fields as columns.",
                    self._where,
                )
            codec = None
        return replace(self._shape, value=codec)


def refuse_untyped(columns: pa.Schema, shape: TableShape, where: str) -> None:
    """``InvalidInput`` if the columns of a table are the fields of values, and its sink has no codec for them."""
    if not shape.is_typed and not is_raw(columns):
        raise InvalidInput(
            f"The columns of the table {where} are the fields of its log's values, and it was opened without their "
            "codec: open it with the schema that it was made with (value=)."
        )


def is_raw(columns: pa.Schema | None) -> bool:
    """Whether there is a table, and it has the record's own columns and not the fields of values."""
    return columns is not None and TYPED.offset not in columns.names and TYPED.valid[0] not in columns.names


def shape_of(
    mode: Mode,
    value: Value | None,
    key: str | Sequence[str],
    tombstones: Tombstones | None,
    transform: ArrowTransform | None,
    *,
    layout: Layout | None = None,
    has_plain_types: bool = False,
) -> TableShape:
    """The shape of a table by the options of its sink, as far as it does not depend on the log."""
    kind, codec = "latest" if mode == "marked" else mode, None if isinstance(value, str) else value
    columns = (key,) if isinstance(key, str) else tuple(key)
    return TableShape(
        *(kind, codec, columns, transform, mode == "marked", has_plain_types, tombstones),
        layout=layout_of(layout, kind, as_text=has_plain_types),
    )
