"""Names of batch objects: ULIDs, which sort by time and name the writer."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.head import WriterId

SUFFIX: Final = ".batch"

_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES: Final = {digit: value for value, digit in enumerate(_DIGITS)}
_ULID = re.compile(rf"[0-7][{_DIGITS}]{{25}}")
_TIME_DIGITS: Final = 10
_MARK_DIGITS: Final = 16
_MARK_BITS: Final = 80
_MAX_TIME: Final = (1 << 48) - 1
_ENCODED: Final = re.compile(r"""[^ -~]|[\\{^}%`\]">\[~<#|*?]""")
"""What Rust's ``object_store`` encodes in a part of a path."""


def new_location(folder: str, now: int, writer: WriterId, number: int) -> str:
    """Where a batch goes that is uploaded now (microseconds): ``<folder>/<ULID>.batch``.

    The 80 bits behind the time are drawn from writer and number instead of anew each time. So all names that a batch
    ever had are known to be of one batch, in whatever process and however late it was uploaded again.

    >>> from uuid import UUID
    >>> new_location("ingest", 1_700_000_000_000_000, WriterId(UUID(int=7)), 0)
    'ingest/01HF7YAT00ZRK3CGQKNXK2TJ3B.batch'
    """
    digest = hashlib.blake2b(writer.bytes + number.to_bytes(8, "little"), digest_size=_MARK_BITS // 8)
    time = min(max(now // 1000, 0), _MAX_TIME)
    mark = int.from_bytes(digest.digest(), "big")
    return f"{folder}/{_encoded(time, _TIME_DIGITS)}{_encoded(mark, _MARK_DIGITS)}{SUFFIX}"


def mark_of(location: str) -> str:
    """What all names of one batch have in common: the end of its ULID, or the whole location if it has none."""
    name = _ulid_in(location)
    return location if name is None else name[_TIME_DIGITS:]


def tail_of(location: str) -> str:
    """How every name with the same mark ends, if it is one of ours: what is looked for first, because it is quick."""
    return location[-_MARK_DIGITS - len(SUFFIX) :]


def time_of(location: str) -> int | None:
    """When the batch was uploaded, by its name (microseconds); None if that is no ULID.

    >>> time_of("ingest/01HF7YAT00ZRK3CGQKNXK2TJ3B.batch")
    1700000000000000
    """
    name = _ulid_in(location)
    if name is None:
        return None
    time = 0
    for digit in name[:_TIME_DIGITS]:
        time = time << 5 | _VALUES[digit]
    return time * 1000


def _ulid_in(location: str) -> str | None:
    name = location.rpartition("/")[2].removesuffix(SUFFIX).upper()
    return name if _ULID.fullmatch(name) else None


def _encoded(number: int, digits: int) -> str:
    return "".join(_DIGITS[number >> 5 * place & 31] for place in reversed(range(digits)))


def stored_as(path: str) -> str:
    """The name under which implementations on Rust's ``object_store`` keep an object: ``Path::from`` of that crate.

    It percent-encodes, part by part, control characters, everything but ASCII, and the characters that S3 and Google
    Cloud Storage recommend to avoid.

    >>> stored_as("größe/a~b.batch"), stored_as("ingest/plain name.batch")
    ('gr%C3%B6%C3%9Fe/a%7Eb.batch', 'ingest/plain name.batch')
    """
    return _ENCODED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogatepass")), path)


def checked_path(path: str, what: str) -> str:
    """The path, if it is the same object in every store and for every implementation."""
    pieces = path.split("/")
    if "\0" in path or any(piece in ("", ".", "..") for piece in pieces):
        raise InvalidInput(f"{what}={path!r} cannot be a path in a store: write it as 'folder/name'.")
    strange = _ENCODED.search(path)
    if strange is not None:
        raise InvalidInput(
            f"{what}={path!r} holds {strange[0]!r}, which other implementations of the queue store percent-encoded, as "
            f"{stored_as(path)!r}, and some do not: they and this one would see two queues. Name it without."
        )
    return path
