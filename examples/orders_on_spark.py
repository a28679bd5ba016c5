"""Orders on Spark: a typed log, a table that stays in step with it, and a result that is written back into a log.

Run it with ``python examples/orders_on_spark.py [folder]``; it needs the extras ``spark`` and ``delta``, and Java 17 or
21. Kill it at any step and run it again in the same folder: the table and the sums are the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

import strandline as sl

ORDER = sl.values.Json(pa.schema({"id": pa.int64(), "customer": pa.string(), "amount": pa.float64()}))
SUM = sl.values.Json(pa.schema({"customer": pa.string(), "total": pa.float64(), "orders": pa.int64()}))


def main(folder: Path) -> None:
    # 1. A log whose values have a format. Any number of producers may append, from any machine.
    orders = sl.open(f"file://{folder}/orders", create=True, value=ORDER)
    if not orders.bounds().next:
        with orders.producer() as producer:
            for number in range(1000):
                order = {"id": number, "customer": f"c{number % 7}", "amount": float(number % 100)}
                producer.append(key=b"%d" % number, value=order)
            producer.append(key=b"3", op=sl.Op.DELETE)  # order 3 was cancelled
    print(f"The log ends at offset {orders.bounds().next:,}.")

    # 2. A table with one row per order, exactly in step with the log. There is no checkpoint: the table has its cursor.
    spark = sl.spark.local_session("orders")
    table = sl.DeltaSink(f"{folder}/orders-table", mode="latest", value="log")
    sl.spark.follow(spark, orders.url, table, slot="table", trigger={"availableNow": True}).await_termination()
    rows = DeltaTable(f"{folder}/orders-table").count()
    print(f"The table has {rows:,} orders; clean: {sl.tables.verify(table, orders).is_clean}.")

    # 3. Any query over the log, by the names of the value's fields.
    frame = spark.read.format("strandline").option("decode", "true").load(orders.url)
    frame.createOrReplaceTempView("orders")
    sums = spark.sql("""
        SELECT customer AS _key, customer, sum(amount) AS total, count(*) AS orders
        FROM orders WHERE _op = 0 GROUP BY customer ORDER BY customer
    """)

    # 4. Its result as records of another log. The job has a name, so that running it again adds nothing.
    with sl.open(f"file://{folder}/sums", create=True, value=SUM) as target:
        job = sums.coalesce(1).write.format("strandline").mode("append")
        job.option("job", f"sums up to {orders.bounds().next}").save(target.url)
        for batch in sl.log.read_decoded(target):
            for row in batch.to_pylist():
                print(f"{row['customer']}: {row['orders']:,} orders, {row['total']:,.2f} in all")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-orders-")))
