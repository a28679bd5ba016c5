"""The datasets of the pipeline: all orders as a table, and the large ones as a log."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table
def orders() -> DataFrame:
    """All orders, with the fields of their values as columns."""
    return spark.readStream.format("strandline").option("decode", "true").load(spark.conf.get("spark.orders.log"))


dp.create_sink(
    "large", "strandline", {"path": spark.conf.get("spark.orders.large_log"), "writer": "large", "create": "true"}
)


@dp.append_flow(target="large")
def large_orders() -> DataFrame:
    """Orders above 90, as records of a log."""
    rows = spark.readStream.table("orders").where("amount > 90")
    return rows.selectExpr("_key AS key", "to_json(struct(id, customer, amount)) AS value")
