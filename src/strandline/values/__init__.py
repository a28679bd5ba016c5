"""Typed values: codecs between the value bytes of records and Arrow columns, schemas, and their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.values.arrow import Arrow as Arrow
    from strandline.values.avro import Avro as Avro
    from strandline.values.contract import Codec as Codec
    from strandline.values.contract import Decoded as Decoded
    from strandline.values.envelopes import BeforeAfter as BeforeAfter
    from strandline.values.envelopes import Debezium as Debezium
    from strandline.values.evolution import Evolution as Evolution
    from strandline.values.evolution import conform_columns as conform_columns
    from strandline.values.evolution import evolve as evolve
    from strandline.values.json import Json as Json
    from strandline.values.messagepack import MessagePack as MessagePack
    from strandline.values.protobuf import Protobuf as Protobuf
    from strandline.values.raw import Raw as Raw
    from strandline.values.schemas import as_schema as as_schema

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Arrow": "strandline.values.arrow",
        "Avro": "strandline.values.avro",
        "BeforeAfter": "strandline.values.envelopes",
        "Codec": "strandline.values.contract",
        "Debezium": "strandline.values.envelopes",
        "Decoded": "strandline.values.contract",
        "Evolution": "strandline.values.evolution",
        "Json": "strandline.values.json",
        "MessagePack": "strandline.values.messagepack",
        "Protobuf": "strandline.values.protobuf",
        "Raw": "strandline.values.raw",
        "as_schema": "strandline.values.schemas",
        "conform_columns": "strandline.values.evolution",
        "evolve": "strandline.values.evolution",
    },
)
