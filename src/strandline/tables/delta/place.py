"""Checks of a Delta table's place: VACUUM deletes every file within it that is not the table's.

So no table is created around other files or within another table, and none is vacuumed that has come to hold others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from strandline.errors import TransientStorageError, WrongKind
from strandline.log.folders import (
    FIRST_BYTES,
    PROBED,
    TABLE_SIGNS,
    Contents,
    FolderKind,
    check_new,
    check_new_table,
    contents,
    recognise,
)
from strandline.model.addresses import split_address
from strandline.snapshots.staging import files_below
from strandline.storage.disk import is_linked
from strandline.tables.delta.files import DeltaFiles, table_folder
from strandline.tables.files.layout import is_data_file

_BUCKETS: Final = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
"""Schemes whose addresses are a bucket and a prefix in it."""
_HISTORY: Final = "_delta_log"
_HIDDEN: Final = ("_", ".")
"""Names that VACUUM leaves alone begin so."""
_FORBIDDEN: Final = "403 Forbidden"
_OF_TABLES: Final = re.compile(r".*\.(parquet|bin|crc)(#\d+)?", re.DOTALL)
"""Data files, deletion vectors and Hadoop's checksums; with a number: an upload into a folder that was not finished."""


def check_place(files: DeltaFiles) -> None:
    """``WrongKind`` if something else is at or below the place of a new table, or the place is within another table.

    In a bucket this is one listing, and two requests for each prefix above. Prefixes that the credentials may not read
    are not looked at.
    """
    folder = table_folder(files.url)
    if folder is not None:
        check_new(folder, FolderKind.DELTA_TABLE, disk=files.disk, is_leftover=is_data_file)
        return
    rows = files.listed(recursive=False)
    tops = {row.name for row in rows}
    probed = {name: _first_bytes(files, files.url, name) for name in PROBED if name.partition("/")[0] in tops}
    firsts = {name: first for name, first in probed.items() if first is not None}
    around = next((prefix for prefix in prefixes_above(files.url) if _is_table(files, prefix)), None)
    check_new_table(Contents(files.url, recognise(rows, firsts)), around, is_data_file)


def refuse_file(files: DeltaFiles) -> None:
    """``WrongKind`` if the table's folder is a file."""
    folder = table_folder(files.url)
    if folder is not None and contents(folder, disk=files.disk).kinds & {FolderKind.FILE, FolderKind.SPOOL}:
        raise WrongKind(f"{files.url} is a file, and a Delta table is a folder: choose another path.")


def refuse_linked_log(files: DeltaFiles) -> None:
    """``WrongKind`` if the table's history is behind a symbolic link: commits would go into another table."""
    folder = table_folder(files.url)
    if folder is not None and is_linked(folder, _HISTORY):
        raise WrongKind(
            f"The folder {_HISTORY} of the table {files.url} is a symbolic link, which may lead into another table: it "
            "was neither read nor written. Put the folder itself there."
        )


def refuse_other_files(url: str, unnamed: Iterable[str]) -> None:
    """``WrongKind`` if files that the table does not name are not data files: they belong to something else."""
    others = sorted(path for path in unnamed if not _OF_TABLES.fullmatch(path))
    if others:
        raise WrongKind(
            f"There are files of something else within the table {url} ({', '.join(others[:3])}"
            f"{', …' if len(others) > 3 else ''}), which a VACUUM would delete: "  # noqa: PLR2004 - enough to find them
            "nothing was removed. Move them elsewhere first."
        )


def refuse_links(files: DeltaFiles) -> None:
    """``WrongKind`` if there is a symbolic link within the table's folder where VACUUM looks for files."""
    folder = table_folder(files.url)
    if folder is None:
        return
    found = files_below(folder, disk=files.disk).items()
    link = next((path for path, row in found if row.is_link and not path.startswith(_HIDDEN)), None)
    if link is not None:
        raise WrongKind(
            f"There is a symbolic link within the table {files.url} ({link}), and a VACUUM would delete the files that "
            "it leads to: nothing was removed. Remove the link first."
        )


def prefixes_above(url: str) -> Iterator[str]:
    """The prefixes of a bucket above an address in it, the nearest first.

    >>> list(prefixes_above("s3://bucket/a/b/c/"))
    ['s3://bucket/a/b', 's3://bucket/a', 's3://bucket']
    >>> list(prefixes_above("memory://a/b"))
    []
    """
    place = split_address(url)
    if place.scheme not in _BUCKETS:
        return
    above = place.path.rstrip("/")
    while above:
        above = above.rpartition("/")[0].rstrip("/")
        yield f"{place.scheme}://{place.netloc}{above}"


def _is_table(files: DeltaFiles, prefix: str) -> bool:
    try:
        return any(_first_bytes(files, prefix, name) is not None for name in TABLE_SIGNS)
    except TransientStorageError as error:
        if _FORBIDDEN in str(error):
            return False
        raise


def _first_bytes(files: DeltaFiles, prefix: str, name: str) -> bytes | None:
    """First bytes of an object, by the table's storage options; None if there is none of that name."""
    try:
        with files.handler(prefix).open_input_file(name) as found:
            return bytes(found.read(FIRST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransientStorageError(f"It is unknown what is at {prefix}, and no table was created: {error}") from error
