"""A change feed into PostgreSQL: a table of customers, exactly in step with a log, joined with tables of its own.

Run it with ``python examples/feed_into_postgres.py DSN [folder]``, for instance ``"dbname=shop user=me"``; it needs the
extras ``postgres`` and ``typed``. Kill it at any moment and run it again with the same folder: each change is applied
once, since rows and cursor are one transaction.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import psycopg
import pyarrow as pa

import strandline as sl

CUSTOMER = sl.values.Json(pa.schema({"id": pa.int64(), "name": pa.string(), "city": pa.string()}))


def main(dsn: str, folder: Path) -> None:
    # 1. Changes of customers, as a service appends them: the key says whose, the value is the new state.
    log = sl.open(f"file://{folder}/customers", create=True, value=CUSTOMER)
    if not log.bounds().next:
        with log.producer() as producer:
            for number in range(500):
                customer = {"id": number, "name": f"customer {number}", "city": "Oslo" if number % 2 else "Rome"}
                producer.append(key=b"%d" % number, value=customer)
            producer.append(key=b"7", value={"id": 7, "name": "customer 7", "city": "Rome"})  # moved
            producer.append(key=b"8", op=sl.Op.DELETE)  # left

    # 2. The table: one row per customer, typed columns, and the cursor in the same transaction. A service would follow
    # for ever, without upto=; two of them cannot both commit.
    table = sl.PostgresSink(dsn, table="customers", mode="latest", value="log")
    end = sl.follow(log, table, slot="postgres", upto="end")
    print(f"The table is at offset {end.next}; clean: {sl.tables.verify(table, log).is_clean}.")

    # 3. It is a table as any other: other tables refer to it, and queries join it.
    with psycopg.connect(dsn) as db:
        db.execute("create table if not exists purchases (customer bigint, amount numeric)")
        db.execute("truncate purchases")
        db.execute("insert into purchases select id, 10 from customers where id % 100 = 7")
        sums = db.execute("""
            select city, count(*), sum(amount) from customers join purchases on customer = id
            group by city order by city
        """)
        for city, count, amount in sums:
            print(f"{city}: {count} purchases, {amount} in all")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="strandline-customers-")))
