"""``float32`` that becomes ``float64``: refused where the table's rows were rounded, until they are built again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog

import strandline as sl
from strandline.errors import SchemaRefused
from strandline.tables.maintain.operations import rebuild, verify

NARROW = pa.schema({"id": pa.int32(), "price": pa.float32(), "sizes": pa.list_(pa.struct({"w": pa.float32()}))})
WIDE = pa.schema({"id": pa.int64(), "price": pa.float64(), "sizes": pa.list_(pa.struct({"w": pa.float64()}))})
ROW = {"id": 1, "price": 0.1, "sizes": [{"w": 0.1}]}


def make_sink(kind: str, tmp_path: Path, catalog: Any) -> Any:
    def made(**options: Any) -> Any:
        match kind:
            case "delta":
                return sl.DeltaSink(str(tmp_path / "table"), **options)
            case "iceberg":
                return sl.IcebergSink(catalog, "shop.orders", **options)
        return sl.SqliteSink(str(tmp_path / "shop.db"), table="orders", **options)

    return made


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    found = InMemoryCatalog("t", warehouse=f"file://{tmp_path}/warehouse")
    yield found
    found.close()


def append(log: Any, codec: Any) -> None:
    with log.producer(value=codec) as producer:
        producer.append(key=b"k", value=ROW)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "codec", [sl.values.Json, sl.values.MessagePack, lambda schema: sl.values.Debezium(sl.values.Json(schema))]
)
@pytest.mark.parametrize("kind", ["delta", "iceberg", "sqlite"])
def test_rows_that_were_rounded_are_built_again_before_their_column_is_wider(tmp_path, catalog, kind, codec):
    sink = make_sink(kind, tmp_path, catalog)
    log = sl.open(str(tmp_path / "log"), create=True)
    append(log, codec(WIDE))
    sl.follow(log, sink(value=codec(NARROW), key="id"), upto="end")
    append(log, codec(WIDE))
    wide = sink(value=codec(WIDE), key="id")
    with pytest.raises(SchemaRefused, match=r"'price' .* rounded .*'strandline table rebuild'"):
        sl.follow(log, wide, upto="end")
    rebuild(sink(value=codec(WIDE), key="id"), log)
    append(log, codec(WIDE))
    assert sl.follow(log, sink(value=codec(WIDE), key="id"), upto="end").next == 3
    assert verify(sink(value=codec(WIDE), key="id"), log).is_clean


@pytest.mark.parametrize("kind", ["delta", "iceberg", "sqlite"])
def test_floats_that_are_narrow_in_the_values_become_wider_and_stay_what_they_were(tmp_path, catalog, kind):
    sink = make_sink(kind, tmp_path, catalog)
    log = sl.open(str(tmp_path / "log"), create=True)
    narrow, wide = (sl.values.Arrow(pa.schema({"price": one})) for one in (pa.float32(), pa.float64()))
    with log.producer(value=narrow) as producer:
        producer.append(key=b"k", value={"price": 0.1})
    sl.follow(log, sink(value=narrow), upto="end")
    with log.producer(value=wide) as producer:
        producer.append(key=b"l", value={"price": 0.1})
    sl.follow(log, sink(value=wide), upto="end")
    assert verify(sink(value=wide), log).is_clean


def test_a_typed_log_may_name_wider_floats_since_its_values_are_not_rounded(tmp_path):
    log = sl.open(str(tmp_path / "log"), create=True, value=sl.values.Json(NARROW))
    append(log, None)
    log.evolve_value(sl.values.Json(WIDE))
    assert pa.Table.from_batches(sl.log.read_decoded(log)).column("price").to_pylist() == [0.1]
