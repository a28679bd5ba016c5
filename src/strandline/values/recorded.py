"""Codecs as a log records them in its identity: a format's name and its schema as JSON, with version numbers.

A field is ``{"name": …, "type": …}``. The type of a single value is its name (``"int64"``, ``"timestamp[us, UTC]"``,
``"decimal128(12, 2)"``); lists, maps and structs are ``{"list": type}``, ``{"map": type}``, ``{"struct": [fields]}``.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import CorruptData, InvalidInput, SchemaRefused, UnsupportedVersion
from strandline.formats.json.value_versions import ValueVersion
from strandline.model.addresses import refuse_credentials
from strandline.values.codecs.arrow import Arrow
from strandline.values.codecs.avro import Avro
from strandline.values.codecs.envelopes import BeforeAfter, Debezium
from strandline.values.codecs.protobuf import Protobuf
from strandline.values.codecs.raw import Raw
from strandline.values.codecs.registry import RecordedAddress
from strandline.values.codecs.structs import Json, MessagePack
from strandline.values.contract import Codec
from strandline.values.decoding import value_fields
from strandline.values.schema.constraints import Constrained, read_constraints, tightened
from strandline.values.schema.evolution import evolve
from strandline.values.schema.limits import MAX_DEPTH
from strandline.values.schema.schemas import as_schema, is_known_zone, parsed
from strandline.values.schema.type_names import type_name, type_named

_MOST_BYTES: Final = 1 << 20
"""Limit on a recorded schema: each process that opens the log reads all of its versions."""
_CONSTRAINED: Final = "+constraints"
"""Ending of a format's name: a release that cannot enforce the constraints does not know the name, and says so."""


def as_version(codec: Codec, number: int = 1) -> ValueVersion:
    """A codec as a log records it.

    ``InvalidInput`` for a codec of the caller's own, which no reader could find, and for fields that none decodes.
    """
    value_fields(codec)
    version = ValueVersion.of(number, *_description(codec))
    if len(version.schema) > _MOST_BYTES:
        raise InvalidInput(
            f"The schema takes {len(version.schema):,} bytes, and a log records up to {_MOST_BYTES:,}: leave out what "
            "values do not use, or use a schema registry."
        )
    return version


def codec_of(version: ValueVersion, where: str) -> Codec:
    """The codec that a log has recorded.

    ``UnsupportedVersion`` for a format, or a type of a column, that this release does not know; ``CorruptData`` if its
    schema is damaged.
    """
    try:
        return _built(version.format, version.schema)
    except LookupError as error:
        raise UnsupportedVersion(
            f"The values of {where} have the format {version.format[:80]!r} (version {version.number}), which this "
            f"release cannot decode ({str(error.args[0])[:100]}): upgrade strandline, read the values as bytes, or "
            "name a codec."
        ) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"The schema of version {version.number} of the values of {where} is damaged: {str(error)[:200]}. Restore "
            "log.json, or name a codec."
        ) from error


def newest(versions: Sequence[ValueVersion], where: str) -> Codec | None:
    """The codec of the newest version; None for a log of plain bytes."""
    return codec_of(versions[-1], where) if versions else None


def check_recorded(versions: Sequence[ValueVersion], codec: Codec | None, where: str) -> None:
    """``InvalidInput`` if a log has not recorded the codec with which it is opened.

    An older version is fine: a program that is not updated yet names it.
    """
    if codec is None:
        return
    # Releases without constraints recorded the types of a JSON Schema alone: their programs still open their logs.
    wanted = (as_version(codec), as_version(_without_constraints(codec)))
    if not any(version.is_same_format(one) for version in versions for one in wanted):
        has = f"the values {versions[-1].format} (version {versions[-1].number})" if versions else "plain bytes"
        raise InvalidInput(
            f"The log at {where} has {has}, and not {codec!r:.200}; opening does not change that: evolve_value does, "
            "or open it without a codec."
        )


def with_version(versions: Sequence[ValueVersion], codec: Codec, where: str) -> tuple[ValueVersion, ...]:
    """The versions with one more, unless the newest is the same already.

    Allowed are new fields, fields that become wider, and fewer or looser constraints: a reader with the new version
    decodes all values of the older ones. Anything else is ``SchemaRefused``, with what to do. ``InvalidInput`` for a
    codec without a schema.
    """
    if not len(codec.schema):
        raise InvalidInput(
            f"The codec {codec!r:.100} names no columns, and readers of a typed log need them: give it a schema, such "
            "as sl.values.Arrow(pyarrow.schema(...))."
        )
    wanted = as_version(codec, len(versions) + 1)
    if versions and versions[-1].is_same_format(wanted):
        return tuple(versions)
    keyword = getattr(getattr(codec, "codec", codec), "unenforced", None)
    if keyword is not None:  # the schema promises more than the log keeps
        raise SchemaRefused(
            f"The JSON Schema has {keyword}, which {codec.name} values are not checked for: leave the keyword out of "
            "the schema that the log records, and check it where values are produced."
        )
    if versions:
        _check_change(codec_of(versions[-1], where), codec, where)
    return (*versions, wanted)


def _without_constraints(codec: Codec) -> Codec:
    match codec:
        case Json() | MessagePack() if codec.constraints:
            return type(codec)(codec.schema)
        case Debezium() | BeforeAfter():
            return type(codec)(_without_constraints(codec.codec))
    return codec


def check_copied(source: Sequence[ValueVersion], target: Sequence[ValueVersion], where: str) -> None:
    """``SchemaRefused`` if a typed log ``where`` cannot decode the values of another typed log that it is to hold, too.

    Its newest version has to be able to decode those of the source's newest one. A log of plain bytes takes all values,
    and values of a log of plain bytes are vouched for by the caller.
    """
    if not source or not target or any(one.is_same_format(source[-1]) for one in target):
        return
    try:
        _check_change(codec_of(source[-1], "the source"), codec_of(target[-1], where), "the source")
    except SchemaRefused as error:
        raise SchemaRefused(
            f"{where} cannot decode the values of the source ({error}): record the source's format there with "
            "evolve_value, or choose a log of that format, or of plain bytes."
        ) from error


def _check_change(old: Codec, new: Codec, where: str) -> None:
    if type(old) is not type(new):
        raise SchemaRefused(
            f"The values of {where} are {old.name}, and {new.name} is another format, which cannot decode them: keep "
            "the format, or begin a new log."
        )
    evolve(old.schema, new.schema)
    behind = evolve(new.schema, old.schema)
    if behind.added:
        raise SchemaRefused(
            f"The field '{behind.added[0].name}' is in the values of {where} and missing from the new schema: keep it "
            "there; producers may leave it null."
        )
    if behind.widened:
        field = behind.widened[0]
        raise SchemaRefused(
            f"The field '{field.name}' is {field.type} in the values of {where} and narrower in the new schema: keep "
            "its type."
        )
    _check_bytes(old, new, where)


def _check_bytes(old: Codec, new: Codec, where: str) -> None:
    """Whether the new codec understands the bytes that the old one wrote, beyond their fields."""
    match old, new:
        case Debezium(), Debezium():
            _check_change(old.codec, new.codec, where)
        case BeforeAfter(), BeforeAfter():
            _check_change(old.codec, new.codec, where)
        case (Json() | MessagePack(), Json() | MessagePack()):
            tighter = tightened(pa.struct(list(old.schema)), old.constraints, new.constraints)
            if tighter is not None:
                raise SchemaRefused(
                    f"The new JSON Schema has {tighter}, and older values of {where} may violate it: keep the "
                    "constraint as it was, or begin a new log."
                )
        case Protobuf(), Protobuf():
            new.check_reads(old)
        case Avro(), Avro():
            new.check_reads(old)


def _description(codec: Codec) -> tuple[str, dict[str, Any]]:
    match codec:
        case Json() | MessagePack():
            further = {"constraints": codec.constraints} if codec.constraints else {}
            name = codec.name + _CONSTRAINED if further else codec.name
            return name, {"fields": encode_schema(codec.schema), **further}
        case Arrow():
            return codec.name, {"fields": encode_schema(codec.schema), **codec.limits()}
        case Raw():
            return codec.name, {}
        case Protobuf():
            files, message = codec.settings().values()
            return codec.name, {"files": base64.b64encode(files).decode(), "message": message}
        case Avro():
            return codec.name, _avro_description(codec)
        case Debezium() | BeforeAfter():
            name, schema = _description(codec.codec)
            return codec.name, {"format": name, "schema": schema}
    raise InvalidInput(
        f"A log records only formats of strandline, and {codec!r:.100} is another codec: give it to the producers, "
        "sinks and readers themselves."
    )


def _avro_description(codec: Avro) -> dict[str, Any]:
    text, registry, number = codec.settings().values()
    found: dict[str, Any] = {"schema": json.loads(text)}
    if isinstance(registry, str):
        refuse_credentials(registry, "give it the registry's address without them")
        found["registry"] = registry
    elif registry is not None:
        found["schemas"] = {str(one): parsed(schema) for one, schema in registry.items()}
    return found if number is None else {**found, "schema_id": number}


@lru_cache(maxsize=64)
def _built(name: str, schema: str) -> Codec:
    if name not in _BUILD:
        raise LookupError("it does not know that format")
    found = json.loads(schema)
    try:
        return _BUILD[name](found)
    except KeyError as error:  # not an unknown format: a part of the schema is missing
        raise ValueError(f"{error} is missing") from error


def _avro(found: dict[str, Any]) -> Avro:
    registry = found.get("registry")
    if isinstance(registry, str):
        registry = RecordedAddress(registry)
    if "schemas" in found:
        registry = {int(number): schema for number, schema in found["schemas"].items()}
    return Avro(found["schema"], registry=registry, schema_id=found.get("schema_id"))


def _protobuf(found: dict[str, Any]) -> Protobuf:
    try:
        return Protobuf(base64.b64decode(found["files"], validate=True), found["message"])
    except binascii.Error as error:
        raise ValueError(f"its descriptor cannot be read: {error}") from error


def _arrow(found: dict[str, Any]) -> Arrow:
    schema = decode_schema(found["fields"])
    limits = {name: found[name] for name in ("max_columns", "max_name") if name in found}
    return Arrow(schema if len(schema) else None, **limits)


def _constrained(found: dict[str, Any]) -> Constrained:
    schema = decode_schema(found["fields"])
    return Constrained(schema, read_constraints(pa.struct(list(schema)), found["constraints"]))


_BUILD: Final[dict[str, Callable[[dict[str, Any]], Codec]]] = {
    "json": lambda found: Json(decode_schema(found["fields"])),
    "json" + _CONSTRAINED: lambda found: Json(_constrained(found)),
    "messagepack": lambda found: MessagePack(decode_schema(found["fields"])),
    "messagepack" + _CONSTRAINED: lambda found: MessagePack(_constrained(found)),
    "arrow": _arrow,
    "raw": lambda _: Raw(),
    "protobuf": _protobuf,
    "avro": _avro,
    "debezium": lambda found: Debezium(_built(found["format"], json.dumps(found["schema"]))),
    "before-after": lambda found: BeforeAfter(_built(found["format"], json.dumps(found["schema"]))),
}
"""How each format's codec is made from its recorded schema."""


def encode_schema(fields: Iterable[pa.Field]) -> list[dict[str, Any]]:
    """The fields as JSON.

    >>> encode_schema(pa.schema({"id": pa.int64(), "tags": pa.list_(pa.string())}))
    [{'name': 'id', 'type': 'int64'}, {'name': 'tags', 'type': {'list': 'string'}}]
    """
    return [{"name": field.name, "type": _type_json(field.type)} for field in fields]


def decode_schema(fields: Any) -> pa.Schema:
    """The schema of recorded fields; ``ValueError`` if they are damaged, ``LookupError`` for a type that is unknown.

    >>> decode_schema([{"name": "at", "type": "timestamp[us, UTC]"}])
    at: timestamp[us, tz=UTC]
    """
    found = _fields(fields, 0)
    return as_schema(pa.schema(found)) if found else pa.schema([])


def _type_json(kind: pa.DataType) -> Any:
    if pt.is_struct(kind):
        return {"struct": encode_schema(kind)}
    if pt.is_map(kind):
        return {"map": _type_json(kind.item_type)}
    if pt.is_list(kind):
        return {"list": _type_json(kind.value_type)}
    if pt.is_large_list(kind):
        return {"large_list": _type_json(kind.value_type)}
    return type_name(kind)


def _fields(found: Any, depth: int) -> list[pa.Field]:
    if not isinstance(found, list) or depth > MAX_DEPTH:
        raise ValueError("the fields of a schema are no list, or nest too deep")
    fields = []
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise ValueError("a field of the schema has no name")  # noqa: TRY004 - the bytes are wrong
        fields.append(pa.field(one["name"], _type(one.get("type"), depth)))
    return fields


_NESTED: Final[dict[str, Callable[[pa.DataType], pa.DataType]]] = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "map": lambda item: pa.map_(pa.string(), item),
}


def _type(found: Any, depth: int) -> pa.DataType:
    if depth > MAX_DEPTH:
        raise ValueError("the schema nests too deep")
    if isinstance(found, dict) and len(found) == 1:
        [(name, inside)] = found.items()
        if name == "struct":
            return pa.struct(_fields(inside, depth + 1))
        if name in _NESTED:
            return _NESTED[name](_type(inside, depth + 1))
    elif isinstance(found, str) and (kind := type_named(found)) is not None:
        if pt.is_timestamp(kind) and not is_known_zone(kind.tz):
            raise LookupError(f"the time zone {kind.tz!r} is not known here")
        return kind
    raise LookupError(f"the type {str(found)[:80]!r} is unknown")
