"""Transforms that Spark runs: a function from DataFrame to DataFrame, or SQL text over the changes of a range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from strandline.errors import InvalidInput
from strandline.spark.failures import GatewayError, unpicklable
from strandline.tables.rows.types import storable

Transform: TypeAlias = Callable[[Any], Any] | str
"""A function from a DataFrame of decoded changes to the rows to keep; or a query, ``SELECT ... FROM changes``."""

_VIEW: Final = "strandline_changes"
_OPAQUE: Final = frozenset({"VariantType", "GeometryType", "GeographyType"})
"""By name: older releases of Spark lack some."""


def spark_columns(schema: pa.Schema) -> StructType:
    """Spark's columns for an Arrow schema, all nullable; ``SchemaRefused`` for a type that tables do not store."""
    found = from_arrow_schema(storable(schema), prefer_timestamp_ntz=True)
    return StructType([StructField(field.name, field.dataType) for field in found])


@dataclass(frozen=True, slots=True)
class FrameTransform:
    """A user's transform. It is applied to the changes of one range at a time, never to two ranges together."""

    spark: Any
    given: Transform

    def __call__(self, changes: Any) -> Any:
        """The rows to keep, as a batch DataFrame; ``InvalidInput`` if the transform gives something else."""
        rows = _queried(self.spark, self.given, changes) if isinstance(self.given, str) else self.given(changes)
        if not isinstance(rows, DataFrame) or rows.isStreaming:
            raise InvalidInput(f"A transform returns a batch DataFrame of Spark, not {type(rows).__name__}.")
        return rows

    def columns(self, decoded: pa.Schema) -> pa.Schema:
        """The columns of its rows, given those of the changes. Runs no job unless the transform does."""
        empty = self.spark.createDataFrame([], spark_columns(decoded))
        try:
            schema = self(empty).schema
        except PicklingError as error:
            raise unpicklable("The transform", error) from error
        except (PySparkException, GatewayError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise InvalidInput(f"The transform cannot be applied to the changes: {reason}") from error
        if not schema.names:
            raise InvalidInput("The transform gives no columns: keep at least one.")
        folded = [name.lower() for name in schema.names]  # tables do not tell them apart
        twice = sorted({name for name in schema.names if folded.count(name.lower()) > 1})
        if twice:
            raise InvalidInput(f"The transform gives the column {twice[0]!r} twice: rename one of them.")
        _refuse_opaque(schema)
        found: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        return pa.schema([field.with_nullable(True) for field in found])


def _refuse_opaque(schema: StructType) -> None:
    """``InvalidInput`` for types that Arrow has only as structs of bytes, also inside of others."""
    for field in schema:
        opaque = [kind for kind in _leaves(field.dataType) if type(kind).__name__ in _OPAQUE]
        if opaque:
            raise InvalidInput(
                f"The transform gives the column {field.name!r} as {opaque[0].simpleString().upper()}, which tables do "
                "not store: make it text, such as with to_json, or take fields out of it."
            )


def _leaves(kind: DataType) -> Iterator[DataType]:
    match kind:
        case ArrayType():
            yield from _leaves(kind.elementType)
        case MapType():
            yield from _leaves(kind.keyType)
            yield from _leaves(kind.valueType)
        case StructType():
            for field in kind:
                yield from _leaves(field.dataType)
        case _:
            yield kind


def _queried(spark: Any, text: str, changes: Any) -> Any:
    """The result of a query over ``changes``.

    A common table expression and no view: several pipelines of a session have each their own changes, and a table of
    the session that is called ``changes`` is not meant. Only a query can stand there, and no other statement.
    """
    body = text.strip().rstrip(";").replace("{", "{{").replace("}", "}}")
    query = f"WITH changes AS (SELECT * FROM {{{_VIEW}}})\nSELECT * FROM (\n{body}\n)"  # noqa: S608 - it is the user's
    return spark.sql(query, **{_VIEW: changes})
