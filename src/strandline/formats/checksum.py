"""CRC32C over any buffer, without copying it."""

from __future__ import annotations

import google_crc32c
import pyarrow as pa


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """The checksum of ``data`` after bytes whose checksum is ``value``."""
    # The C extension does not accept a memoryview, but an Arrow buffer over the same bytes.
    return int(google_crc32c.extend(value, data if isinstance(data, bytes) else pa.py_buffer(data)))
