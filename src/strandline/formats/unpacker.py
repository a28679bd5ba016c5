"""Reader of packed binary fields: each length is checked before anything is allocated."""

from __future__ import annotations

import struct
from typing import Any
from uuid import UUID

from strandline.errors import CorruptData

U16 = struct.Struct("<H")
U32 = struct.Struct("<I")


class Unpacker:
    """Reads a buffer front to back; anything that does not fit is ``CorruptData`` naming the object."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        """Start at the first byte of ``data``."""
        self._data = memoryview(data)
        self._at = 0
        self._where = where

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The next fixed group of fields."""
        end = self._at + layout.size
        if end > len(self._data):
            raise self.corrupt(f"ends within a field at byte {self._at}")
        values = layout.unpack_from(self._data, self._at)
        self._at = end
        return values

    def count(self, *, item_size: int) -> int:
        """A u32 count of items of at least ``item_size`` bytes each, which must fit into the remaining bytes."""
        (number,) = self.fields(U32)
        if number * item_size > len(self._data) - self._at:
            raise self.corrupt(f"announces {number} items at byte {self._at}, more than it can hold")
        return int(number)

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        end = self._at + length
        if end > len(self._data):
            raise self.corrupt(f"announces {length} bytes at byte {self._at} and has {len(self._data) - self._at}")
        data = bytes(self._data[self._at : end])
        self._at = end
        return data

    def text(self) -> str:
        """A u16 length and that much UTF-8."""
        (length,) = self.fields(U16)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"holds broken text before byte {self._at}") from error

    def blobs(self, layout: struct.Struct, count: int) -> tuple[list[tuple[Any, ...]], list[bytes]]:
        """``count`` groups of fields. The last field of each is the length of the bytes that follow it."""
        data, at, end = self._data, self._at, len(self._data)
        groups: list[tuple[Any, ...]] = []
        found: list[bytes] = []
        for _ in range(count):  # a head holds tens of thousands of these: kept simple
            start = at + layout.size
            if start > end:
                raise self.corrupt(f"ends within a field at byte {at}")
            group = layout.unpack_from(data, at)
            at = start + group[-1]
            if at > end:
                raise self.corrupt(f"announces {group[-1]} bytes at byte {start}, more than it can hold")
            groups.append(group)
            found.append(bytes(data[start:at]))
        self._at = at
        return groups, found

    def uuid(self) -> UUID:
        """A UUID, in sixteen bytes."""
        return UUID(bytes=self.take(16))

    def end(self) -> None:
        """Refuse remaining bytes."""
        if self._at != len(self._data):
            raise self.corrupt(f"has {len(self._data) - self._at} bytes too many")

    def corrupt(self, what: str) -> CorruptData:
        """The error for damage."""
        return CorruptData(f"{self._where} is damaged: it {what}. Restore the object; retrying does not help.")
