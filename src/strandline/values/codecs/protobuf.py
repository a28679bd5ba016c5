"""The codec of Protobuf messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import InvalidInput, MissingExtra, SchemaRefused
from strandline.model.arguments import checked
from strandline.values.codecs.columns import ColumnShape
from strandline.values.codecs.rows import RowCodec
from strandline.values.schema.limits import MAX_DEPTH, FieldCount
from strandline.values.schema.schemas import as_schema

_WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Int32", "Int64", "UInt32", "UInt64", "Float", "Double", "String", "Bytes")
)
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_MICROSECONDS: Final = 1_000_000
# By cpp_type: int32, int64, uint32, uint64, double, float, bool.
_SCALARS: Final = dict(
    enumerate((pa.int32(), pa.int64(), pa.uint32(), pa.uint64(), pa.float64(), pa.float32(), pa.bool_()), start=1)
)
_ENUM, _STRING, _MESSAGE, _BYTES_TYPE, _GROUP = 8, 9, 10, 12, 10
_WIRE: Final = {"varint": (3, 5), "unsigned varint": (4, 13), "zigzag": (17, 18)}
"""By the type of a field: int64 and int32, uint64 and uint32, sint32 and sint64 have the same bytes."""


class Protobuf(RowCodec):
    """Values that are Protobuf messages of one type.

    An enum is text, ``google.protobuf.Timestamp`` a timestamp in microseconds (finer parts are cut off), and
    the wrappers of ``google/protobuf/wrappers.proto`` are plain columns that may be null. A field that is not
    ``optional`` is never null in proto3: unset, it is 0, empty text or an empty list. So is a null that is encoded.

    Args:
        descriptor: A generated message class, or the bytes of a ``FileDescriptorSet`` (``protoc --include_imports
            --descriptor_set_out``).
        message: The full name of the message, with a ``FileDescriptorSet``.

    Raises:
        SchemaRefused: A field has no columnar type, as in a recursive message.
        MissingExtra: ``strandline[typed]`` is not installed.
    """

    name = "protobuf"
    __slots__ = ("_descriptor", "_files", "_message")

    @checked
    def __init__(self, descriptor: bytes | type, message: str | None = None) -> None:
        _library()
        if isinstance(descriptor, bytes):
            if not isinstance(message, str):
                raise InvalidInput("A FileDescriptorSet needs the full name of the message, such as 'shop.Order'.")
            self._files, self._message = descriptor, message
        else:
            found = getattr(descriptor, "DESCRIPTOR", None)
            if found is None:
                raise InvalidInput(
                    "A descriptor is a generated message class, or the bytes of a FileDescriptorSet, not "
                    f"{descriptor!r:.100}."
                )
            self._files, self._message = _files_of(found), found.full_name
        made = _message_class(self._files, self._message)
        self._descriptor = made.DESCRIPTOR
        self._schema = as_schema(pa.schema(_fields("", made.DESCRIPTOR, 0, FieldCount())))
        self._shapes = _shapes(made.DESCRIPTOR, self._schema)
        self._make = _maker(made.DESCRIPTOR, self._schema)
        self._empty = None
        self._decode = made.FromString
        self._encode = lambda row: bytes(row.SerializeToString(deterministic=True))

    def settings(self) -> dict[str, Any]:
        """The arguments that make an equal codec, as a log records them."""
        return {"descriptor": self._files, "message": self._message}

    @checked
    def check_reads(self, older: Protobuf) -> None:
        """``SchemaRefused`` if older bytes would mean something else: fields are found by their numbers."""
        _check_numbers("", older._descriptor, self._descriptor)


def _check_numbers(path: str, old: Any, new: Any) -> None:
    for field in old.fields:
        same, name = new.fields_by_name.get(field.name), path + field.name
        if same is None:
            continue  # evolve refuses that, and names the column
        if same.number != field.number or _wire(same) != _wire(field):
            raise SchemaRefused(
                f"The field '{name}' has the number {field.number} ({_wire(field)}) in the values and {same.number} "
                f"({_wire(same)}) in the new message: keep numbers and encodings."
            )
        if field.cpp_type == _ENUM:
            names = {member.number: member.name for member in same.enum_type.values}
            lost = [one.name for one in field.enum_type.values if names.get(one.number) != one.name]
            if lost:
                raise SchemaRefused(
                    f"The enum of the field '{name}' has lost or renumbered {lost[0]!r} in the new message: keep it."
                )
        if field.cpp_type == _MESSAGE:
            _check_numbers(f"{name}.", field.message_type, same.message_type)


def _wire(field: Any) -> str:
    """How a field is encoded; numbers of one kind and several widths are alike."""
    return next((kind for kind, types in _WIRE.items() if field.type in types), f"type {field.type}")


def _library() -> tuple[Any, Any, Any]:
    """Modules of the library ``protobuf``, imported on first use: types of descriptors, pools, and the factory."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise MissingExtra("Protobuf values need the extra 'typed': pip install 'strandline[typed]'.") from error
    return descriptor_pb2, descriptor_pool, message_factory


def _files_of(descriptor: Any) -> bytes:
    """The file of a message and all that it imports, each after what it needs."""
    types, _, _ = _library()
    files: dict[str, bytes] = {}

    def add(file: Any) -> None:
        for needed in file.dependencies:
            if needed.name not in files:
                add(needed)
        files[file.name] = file.serialized_pb

    add(descriptor.file)
    result = types.FileDescriptorSet()
    for data in files.values():
        result.file.add().ParseFromString(data)
    return bytes(result.SerializeToString(deterministic=True))


def _message_class(files: bytes, message: str) -> Any:
    """The class of a message in a ``FileDescriptorSet``."""
    types, pools, factory = _library()
    pool = pools.DescriptorPool()
    try:
        for file in types.FileDescriptorSet.FromString(files).file:
            pool.Add(file)
        return factory.GetMessageClass(pool.FindMessageTypeByName(message))
    except KeyError as error:
        raise SchemaRefused(f"The message {message!r:.100} is not in the FileDescriptorSet: check its name.") from error
    except Exception as error:
        raise SchemaRefused(f"The FileDescriptorSet is not valid: {error!s:.200}.") from error


def _maker(descriptor: Any, fields: Any) -> Callable[..., Any]:
    """Gives a message from the values of its fields."""
    _, _, factory = _library()
    kind = factory.GetMessageClass(descriptor)
    names = [field.name for field in fields]
    return lambda *values: kind(**{name: value for name, value in zip(names, values, strict=True) if value is not None})


def _fields(path: str, descriptor: Any, depth: int, count: FieldCount) -> Iterator[pa.Field]:
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"The field '{path[:100]}' of the message is recursive: a column cannot be.")
    for field in descriptor.fields:
        count.add()
        yield pa.field(field.name, _type_of(path + field.name, field, depth, count))


def _type_of(path: str, field: Any, depth: int, count: FieldCount) -> pa.DataType:
    if _is_map(field):
        key, value = field.message_type.fields
        if key.cpp_type != _STRING:
            raise SchemaRefused(f"The field '{path}' is a map whose keys are not text: use a repeated message.")
        return pa.map_(pa.string(), _single(path, value, depth, count))
    single = _single(path, field, depth, count)
    return pa.list_(single) if field.is_repeated else single


def _single(path: str, field: Any, depth: int, count: FieldCount) -> pa.DataType:
    if field.cpp_type == _ENUM:
        return pa.string()
    if field.cpp_type == _STRING:
        return pa.binary() if field.type == _BYTES_TYPE else pa.string()
    if field.cpp_type != _MESSAGE:
        return _SCALARS[field.cpp_type]
    if field.type == _GROUP:
        raise SchemaRefused(f"The field '{path}' is a group, which is obsolete: use a message.")
    if field.message_type.full_name == _TIMESTAMP:
        return pa.timestamp("us", tz="UTC")
    if field.message_type.full_name in _WRAPPERS:
        return _single(path, field.message_type.fields[0], depth, count)
    return pa.struct(list(_fields(f"{path}.", field.message_type, depth + 1, count)))


def _is_map(field: Any) -> bool:
    return bool(field.is_repeated and field.cpp_type == _MESSAGE and field.message_type.GetOptions().map_entry)


def _shapes(descriptor: Any, fields: Any) -> tuple[ColumnShape, ...]:
    by_name = descriptor.fields_by_name
    return tuple(_shape(by_name[field.name], field) for field in fields)


def _shape(described: Any, field: pa.Field) -> ColumnShape:
    kind, get = field.type, _getter(described)
    if pt.is_map(kind):
        return ColumnShape(field, get, (_single_shape(described.message_type.fields[1], kind.item_field, get),))
    if pt.is_list(kind):
        return ColumnShape(field, get, (_single_shape(described, kind.value_field, get),))
    return _single_shape(described, field, get)


def _single_shape(described: Any, field: pa.Field, get: Callable[[Any], Any]) -> ColumnShape:
    kind = described.message_type
    if described.cpp_type == _ENUM:
        names = {value.number: value.name for value in described.enum_type.values}
        numbers = {value.name: value.number for value in described.enum_type.values}
        # A newer writer may have values that this schema does not name yet: they are their numbers.
        return ColumnShape(
            field, get, load=lambda n: names.get(n) or str(n), dump=lambda t: numbers[t] if t in numbers else int(t)
        )
    if kind is None:
        return ColumnShape(field, get)
    make = _maker(kind, kind.fields)
    if kind.full_name == _TIMESTAMP:
        return ColumnShape(field, get, via=pa.int64(), load=_microseconds, dump=lambda us: make(*_parts(us)))
    if kind.full_name in _WRAPPERS:
        return ColumnShape(field, get, load=attrgetter("value"), dump=make)
    return ColumnShape(field, get, _shapes(kind, field.type), make=_maker(kind, field.type))


def _getter(field: Any) -> Callable[[Any], Any]:
    name, get = field.name, attrgetter(field.name)
    if field.has_presence:
        return lambda row: None if row is None or not row.HasField(name) else get(row)
    return lambda row: None if row is None else get(row)


def _microseconds(stamp: Any) -> int:
    nanos = int(stamp.nanos)
    if not 0 <= nanos < 1000 * _MICROSECONDS:
        raise ValueError("the nanoseconds are not within a second")
    return int(stamp.seconds) * _MICROSECONDS + nanos // 1000


def _parts(microseconds: int) -> tuple[int, int]:
    seconds, rest = divmod(microseconds, _MICROSECONDS)
    return seconds, rest * 1000
