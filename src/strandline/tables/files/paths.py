"""Paths of data files, as a table's own history names them: whoever may write there could name any file. No I/O."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from strandline.errors import CorruptData

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[/\\]")
_DECODED: Final = 4
"""How often a path is decoded at most: libraries do so once or twice."""
_STORES: Final = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}
"""Schemes that name the same store."""


def is_inside(path: str) -> bool:
    r"""Whether a path relative to a table's folder stays below it, also once it is decoded.

    >>> all(map(is_inside, ("part-1.parquet", "day=1/part%20a.parquet", "of=http%253A%252F%252Fa/part-1.parquet")))
    True
    >>> any(map(is_inside, ("../a", "a/..%2Fb", "a/%252e%252e/b", "/a", "file:/a", "s3://b/a", "a\\..\\b", "")))
    False
    """
    for _ in range(_DECODED):
        pieces = re.split(r"[/\\]", path)
        is_whole = pieces[0] and pieces[-1]  # an empty one between is that of a partition's value, such as http://
        if not is_whole or _ADDRESS.match(path) or any(piece in (".", "..") for piece in pieces) or "\0" in path:
            return False
        decoded = unquote(path)
        if decoded == path:
            return True
        path = decoded
    return False


def is_below(path: str, location: str) -> bool:
    """Whether the whole address of a file is below that of a table.

    >>> is_below("s3a://b/t/data/x", "s3://b/t"), is_below("/t/data/x", "file:///t"), is_below("/t2/x", "/t")
    (True, True, False)
    >>> is_below("/t/../u/x", "/t")
    False
    """
    folder, file = (_comparable(one) for one in (location, path))
    return file.startswith(f"{folder}/") and is_inside(file[len(folder) + 1 :])


def is_same_place(address: str, other: str) -> bool:
    """Whether two addresses are one place, in two spellings of programs: Spark encodes some letters of a path.

    >>> is_same_place("file:/t/it%27s%20a", "/t/it's a"), is_same_place("s3a://b/t/", "s3://b/t")
    (True, True)
    >>> is_same_place("s3://b/t", "s3://b/t2")
    False
    """
    ours, theirs = _comparable(address), _comparable(other)
    return ours == theirs or unquote(ours) == theirs or ours == unquote(theirs)


def _comparable(address: str) -> str:
    scheme, found, rest = address.rstrip("/").partition("://")
    if not found:
        scheme, rest = "file", address.rstrip("/").removeprefix("file:")
    return f"{_STORES.get(scheme, scheme)}://{rest}"


def outside(path: str, where: str) -> CorruptData:
    """The error for a data file that is not within its table's folder."""
    return CorruptData(
        f"The table {where} names the data file {path[:200]!r}, which is not within the table's own folder, and it was "
        "not read: another program wrote that. Copy a shallow clone whole, or remove the table to build it again."
    )


def linked(path: str, where: str) -> CorruptData:
    """The error for a data file behind a symbolic link."""
    return CorruptData(
        f"The data file {path[:200]!r} of the table {where} is behind a symbolic link, which may lead anywhere, and "
        "was not read: put the file itself into the table's folder."
    )
