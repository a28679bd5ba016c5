"""Strandline: a durable, replayable change log for Python and Spark.

Append changes to a bucket; tables, caches and replicas follow exactly; kill anything at any moment, throw away the
checkpoint, and they are still right.

>>> import strandline as sl
>>> log = sl.open("memory://doctest-front", create=True)
>>> with log.producer() as producer:
...     producer.append(key=b"k", value=b"v").result(timeout=10)
Receipt(first=0, count=1)
>>> [batch.num_rows for batch in log.read()]
[1]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.lazy_names import lazy, opens_addresses

if TYPE_CHECKING:
    from strandline import bulk as bulk
    from strandline import compat as compat
    from strandline import errors as errors
    from strandline import followers as followers
    from strandline import kv as kv
    from strandline import log as log
    from strandline import node as node
    from strandline import snapshots as snapshots
    from strandline import spark as spark
    from strandline import tables as tables
    from strandline import tier as tier
    from strandline import values as values
    from strandline.followers.consumer.consumer import Consumer as Consumer
    from strandline.followers.run import follow as follow
    from strandline.followers.watch.api import Supervisor as Supervisor
    from strandline.followers.watch.api import watch_applied as watch_applied
    from strandline.ingestion.api import ingest as ingest
    from strandline.log.contract import Log as Log
    from strandline.log.produce.producer import Producer as Producer
    from strandline.model.cursor import Cursor as Cursor
    from strandline.model.records import Op as Op
    from strandline.opening import open_url as open_url
    from strandline.tables.delta.sink import DeltaSink as DeltaSink
    from strandline.tables.iceberg.sink import IcebergSink as IcebergSink
    from strandline.tables.sql.postgres import PostgresSink as PostgresSink
    from strandline.tables.sql.sqlite import SqliteSink as SqliteSink

    open = open_url  # noqa: A001 - the public name


def _open_address(address: Any, **options: Any) -> Any:
    from strandline.opening import open_url  # here, since it knows every kind of log

    return open_url(address, **options)


opens_addresses(_open_address)

_get, __dir__, __all__ = lazy(__spec__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # here, since importing it takes longer than all of this module

        return version("strandline")
    return _get(name)
