"""Typed values: codecs between the value bytes of records and Arrow columns, schemas, and their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.values.codecs.arrow import Arrow as Arrow
    from strandline.values.codecs.avro import Avro as Avro
    from strandline.values.codecs.envelopes import BeforeAfter as BeforeAfter
    from strandline.values.codecs.envelopes import Debezium as Debezium
    from strandline.values.codecs.protobuf import Protobuf as Protobuf
    from strandline.values.codecs.raw import Raw as Raw
    from strandline.values.codecs.structs import Json as Json
    from strandline.values.codecs.structs import MessagePack as MessagePack
    from strandline.values.contract import Codec as Codec
    from strandline.values.contract import Decoded as Decoded
    from strandline.values.schema.evolution import Evolution as Evolution
    from strandline.values.schema.evolution import conform_columns as conform_columns
    from strandline.values.schema.evolution import evolve as evolve
    from strandline.values.schema.schemas import as_schema as as_schema

__getattr__, __dir__, __all__ = lazy(__spec__)
