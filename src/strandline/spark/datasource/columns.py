"""The columns that a query asks for, raw or decoded as its log says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.log.contract import Log
from strandline.spark.datasource.decoding import Decoding
from strandline.spark.datasource.opened import OpenedLog
from strandline.spark.datasource.shaping import SPARK_SCHEMA, check_schema
from strandline.spark.failures import retried
from strandline.spark.options import ReadOptions

R = TypeVar("R")


def log_schema(options: ReadOptions) -> StructType:
    """All columns of a log, or of its decoded values."""
    if not options.decode:
        return SPARK_SCHEMA
    return _asked(options, lambda log: Decoding.of(log, options.bad_rows, options.url).spark_schema())


def asked_columns(options: ReadOptions, schema: StructType) -> tuple[pa.Schema, Decoding | None]:
    """The columns of a query in Arrow, and how they are decoded; ``InvalidInput`` for others than the log's."""
    if not options.decode:
        return check_schema(schema, SPARK_SCHEMA), None
    return _asked(options, lambda log: Decoding.planned(log, options.bad_rows, options.url, schema))


def _asked(options: ReadOptions, find: Callable[[Log], R]) -> R:
    """Open the log, and look up what its value format gives."""
    opened = OpenedLog(options, pa.schema([]))
    try:
        return retried(lambda: find(opened.log))
    finally:
        opened.close()
