"""A Protobuf message with a field of each kind, without a compiler."""

from __future__ import annotations

from google.protobuf import descriptor_pb2, timestamp_pb2, wrappers_pb2

Field = descriptor_pb2.FieldDescriptorProto


def order_files() -> bytes:
    """A FileDescriptorSet with ``shop.Order`` (proto3, every field optional) and ``shop.Plain`` (none of them)."""
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    state = file.enum_type.add(name="State")
    for number, name in enumerate(("UNKNOWN", "OPEN", "CLOSED")):
        state.value.add(name=name, number=number)
    line = file.message_type.add(name="Line")
    _optional(line, "sku", 1, Field.TYPE_STRING)
    _optional(line, "count", 2, Field.TYPE_UINT32)
    order = file.message_type.add(name="Order")
    kinds = [
        ("id", Field.TYPE_INT64), ("small", Field.TYPE_SINT32), ("big", Field.TYPE_UINT64), ("share", Field.TYPE_FLOAT),
        ("amount", Field.TYPE_DOUBLE), ("vip", Field.TYPE_BOOL), ("note", Field.TYPE_STRING), ("raw", Field.TYPE_BYTES),
    ]  # fmt: skip
    for number, (name, kind) in enumerate(kinds, start=1):
        _optional(order, name, number, kind)
    order.field.add(name="at", number=20, label=1, type=Field.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp")
    order.field.add(name="rank", number=21, label=1, type=Field.TYPE_MESSAGE, type_name=".google.protobuf.Int32Value")
    order.field.add(name="first", number=22, label=1, type=Field.TYPE_MESSAGE, type_name=".shop.Line")
    plain = file.message_type.add(name="Plain")
    plain.field.add(name="id", number=1, label=1, type=Field.TYPE_INT64)
    plain.field.add(name="state", number=2, label=1, type=Field.TYPE_ENUM, type_name=".shop.State")
    plain.field.add(name="lines", number=3, label=3, type=Field.TYPE_MESSAGE, type_name=".shop.Line")
    plain.field.add(name="numbers", number=4, label=3, type=Field.TYPE_INT32)
    entry = plain.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=Field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=1, type=Field.TYPE_INT32)
    plain.field.add(name="tags", number=5, label=3, type=Field.TYPE_MESSAGE, type_name=".shop.Plain.TagsEntry")
    endless = file.message_type.add(name="Endless")
    endless.field.add(name="next", number=1, label=1, type=Field.TYPE_MESSAGE, type_name=".shop.Endless")
    files = descriptor_pb2.FileDescriptorSet()
    for needed in (timestamp_pb2.DESCRIPTOR, wrappers_pb2.DESCRIPTOR):
        files.file.add().ParseFromString(needed.serialized_pb)
    files.file.add().CopyFrom(file)
    return files.SerializeToString()


def _optional(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: int) -> None:
    message.oneof_decl.add(name=f"_{name}")
    index = len(message.oneof_decl) - 1
    message.field.add(name=name, number=number, label=1, type=kind, proto3_optional=True, oneof_index=index)
