"""CRC32C over any buffer, without copying it."""

from __future__ import annotations

from functools import cache
from typing import Final

import google_crc32c
import pyarrow as pa

_POLYNOMIAL: Final = 0x82F63B78
"""That of CRC32C, with the highest power in the lowest bit."""
_ONE: Final = 1 << 31


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """The checksum of ``data`` after bytes whose checksum is ``value``."""
    # The C extension does not accept a memoryview, but an Arrow buffer over the same bytes.
    return int(google_crc32c.extend(value, data if isinstance(data, bytes) else pa.py_buffer(data)))


def joined_crc32c(first: int, second: int, size: int) -> int:
    """The checksum of bytes with the checksum ``first``, followed by ``size`` bytes with the checksum ``second``.

    >>> joined_crc32c(crc32c(b"strand"), crc32c(b"line"), 4) == crc32c(b"strandline")
    True
    """
    # Each byte that follows multiplies the checksum, as a polynomial, by x to the power of 8.
    place = 0
    while size:
        first = _product(_power(size & 0xFF, place), first)
        size, place = size >> 8, place + 8
    return first ^ second


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of CRC32C."""
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@cache
def _power(digit: int, place: int) -> int:
    """Eight times ``digit``, shifted by ``place``, as an exponent of x."""
    found, square = _ONE, _ONE >> 1
    for _ in range(place + 3):
        square = _product(square, square)
    while digit:
        found = _product(found, square) if digit & 1 else found
        square, digit = _product(square, square), digit >> 1
    return found
