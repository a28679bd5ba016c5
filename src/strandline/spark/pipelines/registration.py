"""Names of Delta tables in a catalog of Spark: a name is made once, points to the table's folder, and is verified."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from pyspark.errors import PySparkException

from strandline.errors import AlreadyExists, InvalidInput, JobFailed, NotFound, Unsupported, printable
from strandline.model.addresses import Address
from strandline.model.arguments import Named, checked
from strandline.spark.failures import GatewayError
from strandline.tables.delta.files import table_folder
from strandline.tables.delta.sink import DeltaSink
from strandline.tables.files.paths import is_same_place
from strandline.tables.maintain.opening import sink_at

_PARTS: Final = (2, 3)


@dataclass(frozen=True, slots=True)
class _Named:
    """A table as Spark's Delta connector describes it."""

    format: str
    id: str | None
    location: str

    def is_table(self, table_id: str, location: str) -> bool:
        """Whether it is the Delta table of that id at that place. A copy of a table has its id."""
        return self.format == "delta" and self.id == table_id and is_same_place(self.location, location)


@checked
def register(spark: Any, table: DeltaSink | Address, name: Named) -> bool:
    """Make ``name`` the name of a Delta table in a catalog of this Spark session; returns whether the name is new.

    When it returns, the name resolves to exactly this table: Spark has found it there, with the table's id. Repeat it
    at any time, also beside others that register the same. ``AlreadyExists``, and nothing is changed, if the name
    stands for anything else: another table, a view, or this table at a place from which it was moved.

    ``name`` is ``schema.table`` or ``catalog.schema.table``; the schema has to exist (``NotFound``). The name is that
    of an external table, which has no rows or columns of its own: dropping it leaves the files, and new columns need
    no second call. The address is given as Spark knows it, such as ``s3a://bucket/orders``; a sink has its own.

    ``Unsupported`` if the session has no Delta connector, or for a table that is none of Delta: an Iceberg table has
    its name in the catalog that its follower commits to, and a second catalog would not see its commits.
    """
    quoted = _quoted(name)
    sink = table if isinstance(table, DeltaSink) else sink_at(table, None)
    if not isinstance(sink, DeltaSink):
        raise Unsupported(
            f"{sink.where} is no Delta table. An Iceberg table has its name in the catalog of its follower, and a name "
            "in a second one would not see later commits; a table of a database has its name there."
        )
    table_id, location = sink.table_id(), _spark_address(sink.url)
    # Looked at before: of a place where there is no table, as Spark reads the address, Spark would make an empty one.
    there = _described(spark, f"delta.{_quoted_part(location)}", connector=True)
    if there is None or not there.is_table(table_id, location):
        raise NotFound(
            f"Spark does not find the table {sink.url} at {location}, and {name} was not made: give the session "
            "access to that store, or name the address as Spark knows it, such as s3a://bucket/orders."
        )
    is_new = False
    found = _described(spark, quoted)
    if found is None:
        is_new = _made(spark, quoted, location)
        found = _described(spark, quoted)
    if found is None or not found.is_table(table_id, location):
        raise AlreadyExists(
            f"The name {name} stands for {_told(found)}, and not for the table at {location}: choose another name, or "
            f"drop that one first (DROP TABLE {name})."
        )
    return is_new


def _told(found: _Named | None) -> str:
    if found is None:
        return "nothing any more"
    if found.format == "view":
        return "a view"
    return f"the {found.format} table at {found.location}" + (f" with the id {found.id}" if found.id else "")


def _quoted(name: str) -> str:
    """The name for SQL; ``InvalidInput`` for one without a schema, which views of the session would hide."""
    parts = name.split(".")
    if len(parts) not in _PARTS or not all(part and part.isprintable() for part in parts):
        raise InvalidInput(f"{name!r} names no table of a catalog: write schema.table, or catalog.schema.table.")
    return ".".join(map(_quoted_part, parts))


def _quoted_part(part: str) -> str:
    """One part of a name for SQL.

    >>> _quoted_part("it`s")
    '`it``s`'
    """
    return "`" + part.replace("`", "``") + "`"


def _spark_address(url: str) -> str:
    """The address as Spark reads it, which decodes nothing in that of a folder."""
    folder = table_folder(url)
    return url.rstrip("/") if folder is None else f"file:{os.path.abspath(folder)}"  # noqa: PTH100 - text, as everywhere


def _described(spark: Any, quoted: str, *, connector: bool = False) -> _Named | None:
    """What stands for a name in Spark; None for nothing. ``connector``: where nothing means that there is none."""
    try:
        [row] = spark.sql(f"DESCRIBE DETAIL {quoted}").collect()
        return _Named(row["format"], row["id"], row["location"] or "")
    except (PySparkException, GatewayError, ValueError) as error:
        condition = str(error.getCondition() or "") if isinstance(error, PySparkException) else ""
        if condition.startswith("EXPECT_TABLE_NOT_VIEW"):
            return _Named("view", None, "")
        # Without the connector's SQL, the statement describes a table whose name is DETAIL.
        is_missing = condition in ("TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND")
        if connector and (is_missing or isinstance(error, ValueError) or condition == "PARSE_SYNTAX_ERROR"):
            raise Unsupported(
                "This Spark session has no Delta connector: start it with the package io.delta:delta-spark, its SQL "
                "extension and its catalog."
            ) from error
        if is_missing or condition.startswith(("DELTA_MISSING", "DELTA_TABLE_NOT_FOUND", "DELTA_PATH_DOES_NOT_EXIST")):
            return None
        raise _failed(quoted, error) from error


def _made(spark: Any, quoted: str, location: str) -> bool:
    """Make the name; False if another one did."""
    try:
        spark.catalog.createTable(quoted, path=location, source="delta")
    except (PySparkException, GatewayError) as error:
        condition = str(error.getCondition() or "") if isinstance(error, PySparkException) else ""
        if condition == "TABLE_OR_VIEW_ALREADY_EXISTS":
            return False
        if condition == "SCHEMA_NOT_FOUND":
            schema = quoted.rpartition(".")[0]
            raise NotFound(f"There is no schema {schema}: create it first (CREATE SCHEMA {schema}).") from error
        raise _failed(quoted, error) from error
    return True


def _failed(quoted: str, error: Exception) -> JobFailed:
    reason = printable(str(error).strip().partition("\n")[0][:300])
    return JobFailed(f"Spark could not look up or make the name {quoted}: {reason}")
