"""Bytes that a query reads of a table, with and without a layout, beside the same table as Spark itself writes it.

The table has orders of thirty days, which arrive up to three days late, of a hundred thousand customers in no order.
DuckDB asks for the rows of one day, and for those of one customer; the bytes are those that its process reads from
files, the table's own log included. Conditions on the day name the partition column where there is one: DuckDB compares
no times with the statistics of a Delta table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from benchmarks.harness import Result, scratch
from benchmarks.spark_tables import spent
from strandline.model.records import RECORD_SCHEMA, no_headers

RECORDS: Final = 10_000_000
DAYS: Final = 30
CUSTOMERS: Final = 100_000
PER_BATCH: Final = 100_000
START: Final = 1_767_225_600_000_000
"""2026-01-01, in microseconds."""
DAY: Final = 86_400_000_000
ORDER: Final = pa.schema(
    {
        "id": pa.int64(),
        "customer": pa.int64(),
        "made": pa.timestamp("us", "UTC"),
        "city": pa.string(),
        "total": pa.float64(),
    }
)
LAYOUT: Final = sl.tables.Layout(partition_by="day(made)", cluster_by="customer")
JARS: Final = Path(__file__).parent.parent / ".services" / "delta" / "jars"
TIMES: Final = "made >= TIMESTAMPTZ '2026-01-15 00:00:00+00' AND made < TIMESTAMPTZ '2026-01-16 00:00:00+00'"
CUSTOMER: Final = "customer = 4711"


def orders(log: Any, records: int) -> None:
    """Fill a log, in the order of time but for lateness."""
    chance = np.random.default_rng(7)
    with log.producer() as producer:
        for first in range(0, records, PER_BATCH):
            count = min(PER_BATCH, records - first)
            numbers = np.arange(first, first + count)
            stamps = START + numbers * (DAYS * DAY // records)
            made = pa.array(stamps - chance.integers(0, 3 * DAY, count)).cast(pa.timestamp("us", "UTC"))
            text = [pa.array(one).cast(pa.string()) for one in (numbers, chance.integers(0, CUSTOMERS, count))]
            cities = pa.array([f"city {n}" for n in range(500)]).take(pa.array(chance.integers(0, 500, count)))
            total = pa.array(chance.integers(100, 100_000, count)).cast(pa.string())
            value = pc.binary_join_element_wise(
                *('{"id":', text[0], ',"customer":', text[1], ',"made":"', pc.strftime(made, "%Y-%m-%dT%H:%M:%SZ")),
                *('","city":"', cities, '","total":', total, "}", ""),
            )
            columns = [
                pa.array(stamps).view(RECORD_SCHEMA.field("timestamp").type),
                pa.repeat(pa.scalar(0, pa.int8()), count),
                text[0].cast(pa.binary()),
                value.cast(pa.binary()),
                no_headers(count),
            ]
            producer.append_batch(pa.table(columns, schema=RECORD_SCHEMA))
            producer.flush()


def bytes_read(query: str) -> tuple[int, int]:
    """The bytes that DuckDB reads from files for a query, and the rows that it finds."""
    with closing(duckdb.connect()) as connection:
        for name in ("avro", "iceberg", "delta"):
            folder = resources.files(f"duckdb_extension_{name}") / "extensions" / f"v{duckdb.__version__}"
            connection.load_extension(str(folder / f"{name}.duckdb_extension"))
        connection.execute("SET timezone = 'UTC'")
        before = _read()
        rows = connection.execute(query).to_arrow_table().num_rows
        return _read() - before, rows


def _read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def measured(name: str, scan: str, day: str, records: int) -> list[Result]:
    """A day's rows, and a customer's, of one table."""
    found = []
    for what, condition in (("one day", day), ("one customer", CUSTOMER)):
        size, rows = bytes_read(f"SELECT id, customer, made, city, total FROM {scan} WHERE {condition}")
        if not 0.2 < rows / (records / (DAYS if what == "one day" else CUSTOMERS)) < 5:
            raise RuntimeError(f"{name} has {rows} rows for {what}.")
        found.append(Result(f"{name}: {what}", size / 1e6, "MB", "", f"{rows:,} rows"))
    return found


def ours(folder: str, log: Any, records: int) -> Iterator[Result]:
    """Tables that follow the log in this process, with and without a layout."""
    catalog = SqlCatalog("c", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    codec = sl.values.Json(ORDER)
    for layout, name in ((None, "no layout"), (LAYOUT, "layout")):
        short = "plain" if layout is None else "laid_out"
        options: dict[str, Any] = {"mode": "append", "value": codec, "layout": layout}
        sinks = {
            "Delta": sl.DeltaSink(f"{folder}/{short}", **options),
            "Iceberg": sl.IcebergSink(catalog, f"shop.{short}", **options),
        }
        for kind, sink in sinks.items():
            yield _cost(f"{kind}, {name}: follow", lambda sink=sink: sl.follow(log, sink, upto="end"), records)
            day = TIMES if layout is None or kind == "Iceberg" else "_made_day = DATE '2026-01-15'"

            def scan(kind: str = kind, short: str = short) -> str:
                if kind == "Delta":
                    return f"delta_scan('{folder}/{short}')"
                return f"iceberg_scan('{catalog.load_table(f'shop.{short}').metadata_location[7:]}')"

            yield from measured(f"{kind}, {name}, as followed", scan(), day, records)
            yield _cost(f"{kind}, {name}: optimize", lambda sink=sink: sl.tables.optimize(sink), records)
            yield from measured(f"{kind}, {name}, optimized", scan(), day, records)
            yield Result(f"{kind}, {name}: files", sl.tables.describe(sink).files, "")
    catalog.close()


def sparks(folder: str, records: int) -> Iterator[Result]:
    """The same rows as Spark writes them: Parquet, and Delta if its connector can."""
    jars = ",".join(map(str, sorted(JARS.glob("*.jar"))))
    more = {
        "spark.jars": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    spark = sl.spark.local_session("bench-layouts", cores=2, memory="3g", **(more if jars else {}))
    from pyspark.sql.functions import to_date

    spark.conf.set("spark.sql.session.timeZone", "UTC")
    paths = [path.removeprefix("file://") for path in DeltaTable(f"{folder}/plain").file_uris()]
    rows = spark.read.parquet(*paths).withColumn("day", to_date("made"))
    for kind in ("parquet", "delta") if jars else ("parquet",):
        for by in ([], ["day"]):
            place = f"{folder}/spark-{kind}-{len(by)}"
            name = f"Spark's {kind}, {'partitionBy day' if by else 'no partitions'}"

            def write(place: str = place, kind: str = kind, by: list[str] = by) -> None:
                rows.write.format(kind).partitionBy(*by).save(place)

            try:
                cost = _cost(f"{name}: write", write, records)
            except Exception as error:  # noqa: BLE001 - its connector does not fit each version of Spark
                print(f"{name} is left out: {str(error).splitlines()[0][:150]}")
                continue
            yield cost
            scan = f"delta_scan('{place}')" if kind == "delta" else f"read_parquet('{place}/**/*.parquet')"
            day = "day = DATE '2026-01-15'" if by else TIMES
            yield from measured(name, scan, day, records)
    spark.stop()


def _cost(name: str, action: Callable[[], object], records: int) -> Result:
    return Result(f"{name} (CPU-s per million)", spent(action) / records * 1e6, "s")


def run(records: int = RECORDS) -> list[Result]:
    """Measure; about fifteen minutes."""
    with scratch() as folder:
        log = sl.open(f"{folder}/log", create=True)
        orders(log, records)
        found = list(ours(folder, log, records))
        found += sparks(folder, records)
    return found
