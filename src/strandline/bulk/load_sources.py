"""Files to load: which ones are at an address, by one listing, and the format of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Final, Literal, TypeAlias

from strandline.bulk.exporting import MANIFEST, PLAN
from strandline.errors import InvalidInput, NotFound
from strandline.model.addresses import Address, as_address
from strandline.storage.objects.store import ObjectInfo, ObjectStore
from strandline.storage.objects.urls import open_store

FileFormat: TypeAlias = Literal["jsonl", "csv", "parquet", "arrow"]
"""One JSON object per line, CSV with a header, Parquet, or Arrow's IPC (file or stream)."""

_FORMATS: Final[dict[str, FileFormat]] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "csv": "csv",
    "parquet": "parquet",
    "arrow": "arrow",
    "arrows": "arrow",
    "feather": "arrow",
    "ipc": "arrow",
}
_COMPRESSIONS: Final = {"gz": "gzip", "zst": "zstd"}


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file to load, as it was when the job began."""

    store: ObjectStore
    path: str
    size: int
    modified: int
    format: FileFormat
    compression: str | None

    @property
    def where(self) -> str:
        """Its address."""
        return f"{self.store.url}/{self.path}"


def format_of(path: str, given: FileFormat | None) -> tuple[FileFormat | None, str | None]:
    """Format and compression of a file by its name.

    >>> format_of("a/b.JSONL.gz", None), format_of("a/b", "csv"), format_of("a/b.txt", None)
    (('jsonl', 'gzip'), ('csv', None), (None, None))
    """
    *stem, suffix = path.rpartition("/")[2].lower().split(".")
    compression = _COMPRESSIONS.get(suffix) if stem else None
    if compression is not None:
        *stem, suffix = stem
    return given or (_FORMATS.get(suffix) if stem else None), compression


def files_at(
    sources: Sequence[Address], given: FileFormat | None, options: dict[str, str] | None = None
) -> list[LoadedFile]:
    """The files at these addresses, in the given order, those of a folder by name; ``NotFound`` for one without any."""
    addresses = [as_address(source) for source in sources]
    search = _FileSearch({_split(address) for address in addresses}, given, options)
    return [file for address in addresses for file in search.files(address)]


def _split(address: str) -> tuple[str, str]:
    """The folder of an address, and the name in it.

    >>> _split("s3://bucket/a/b.csv"), _split("/b.csv"), _split("b.csv")
    (('s3://bucket/a', 'b.csv'), ('/', 'b.csv'), ('.', 'b.csv'))
    """
    folder, _, name = address.rstrip("/").rpartition("/")
    return folder or ("/" if address.startswith("/") else "."), name


@dataclass(frozen=True, slots=True)
class _FileSearch:
    """Finds the files at addresses. Those that are in one folder are found by one listing."""

    addresses: Collection[tuple[str, str]]
    """Folder and name of each address."""
    format: FileFormat | None
    options: dict[str, str] | None = field(repr=False)
    folders: dict[str, tuple[ObjectStore, dict[str, ObjectInfo]]] = field(default_factory=dict)

    def files(self, address: str) -> list[LoadedFile]:
        """The files at one of the addresses, by name."""
        store = open_store(address, self.options)
        rows = list(store.list(""))
        if not rows:
            store, rows = self._beside(address)
        found = [
            self._file(row, store)
            for row in sorted(_without_plan(rows, store), key=lambda row: row.path)
            if not any(part.startswith((".", "_")) for part in row.path.split("/"))
        ]
        if not found:
            raise NotFound(f"There is no file at {address}: check the address.")
        return found

    def _beside(self, address: str) -> tuple[ObjectStore, list[ObjectInfo]]:
        """The address as a file in its folder."""
        folder, name = _split(address)
        if not name or folder.endswith(":/"):
            return open_store(address, self.options), []
        if folder not in self.folders:
            store = open_store(folder, self.options)
            names = {name for place, name in self.addresses if place == folder}
            self.folders[folder] = store, {row.path: row for row in listed(store, names)}
        store, rows = self.folders[folder]
        return store, [rows[name]] if name in rows else []

    def _file(self, row: ObjectInfo, store: ObjectStore) -> LoadedFile:
        try:
            row.path.encode()
        except UnicodeEncodeError as error:
            name = ascii(row.path)[1:-1]
            raise InvalidInput(f"The name of {store.url}/{name} is not UTF-8: rename the file.") from error
        kind, compression = format_of(row.path, self.format)
        if kind is None:
            raise InvalidInput(f"The name of {store.url}/{row.path} does not say its format: name it (--format).")
        if compression is not None and kind not in ("jsonl", "csv"):
            raise InvalidInput(f"{store.url}/{row.path} is compressed as a whole: decompress it (only text may be).")
        return LoadedFile(store, row.path, row.size, row.modified, kind, compression)


def listed(store: ObjectStore, paths: Collection[str]) -> Iterator[ObjectInfo]:
    """The objects with these paths, by one listing: one for each would read the folder of each again."""
    start = commonprefix(list(paths))  # noqa: RUF071 - a listing begins with any letters
    return (row for row in store.list(start) if row.path in paths)


def _without_plan(rows: Sequence[ObjectInfo], store: ObjectStore) -> Sequence[ObjectInfo]:
    """The files of a folder; of an export its parts, and ``InvalidInput`` for one that was not finished."""
    names = {row.path for row in rows}
    parts = [row for row in rows if row.path.startswith("part-")]
    if PLAN not in names or not parts:
        return rows
    if MANIFEST not in names:
        raise InvalidInput(f"{store.url} has an export that was not finished: finish it first, or name its files.")
    return parts
