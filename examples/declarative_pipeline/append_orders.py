"""Appends a thousand orders to a log: ``python append_orders.py URL``."""

from __future__ import annotations

import sys

import pyarrow as pa

import strandline as sl

ORDER = sl.values.Json(pa.schema({"id": pa.int64(), "customer": pa.string(), "amount": pa.float64()}))


def main(url: str) -> None:
    with sl.open(url, create=True, value=ORDER) as log, log.producer() as producer:
        first = log.bounds().next
        for number in range(first, first + 1000):
            order = {"id": number, "customer": f"c{number % 7}", "amount": float(number % 100)}
            producer.append(key=b"%d" % number, value=order)


if __name__ == "__main__":
    main(sys.argv[1])
