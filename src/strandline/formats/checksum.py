"""CRC32C over any buffer, without copying it."""

from __future__ import annotations

from typing import Final

import google_crc32c
import pyarrow as pa

_ZEROS: Final = bytes(1 << 18)


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """The checksum of ``data`` after bytes whose checksum is ``value``."""
    # The C extension does not accept a memoryview, but an Arrow buffer over the same bytes.
    return int(google_crc32c.extend(value, data if isinstance(data, bytes) else pa.py_buffer(data)))


def joined_crc32c(first: int, second: int, size: int) -> int:
    """The checksum of bytes with the checksum ``first``, followed by ``size`` bytes with the checksum ``second``.

    >>> joined_crc32c(crc32c(b"strand"), crc32c(b"line"), 4) == crc32c(b"strandline")
    True
    """
    # Checksums are linear: the first one passes as many zeros as there are bytes in the second.
    passed, zero = first, 0
    while size:
        zeros = _ZEROS[:size]
        passed, zero, size = crc32c(zeros, passed), crc32c(zeros, zero), size - len(zeros)
    return passed ^ zero ^ second
