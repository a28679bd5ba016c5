"""Cloud object stores, and the in-process one, through ``obstore``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions as refusals
from obstore.store import MemoryStore, from_url

from strandline.errors import AlreadyExists, Conflict, InvalidInput, NotFound, StorageError
from strandline.model.cursor import microseconds
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.objects.remote_errors import Raced, classify
from strandline.storage.objects.store import (
    Absent,
    Object,
    ObjectInfo,
    Payload,
    Precondition,
    Version,
    check_whole,
    payload_parts,
)

R = TypeVar("R")

_PAGE: Final = 1000
_ONE_REQUEST: Final = 16 << 20
"""Largest object that is put in one request; larger ones are uploaded in parts, which are retried singly."""
_PIECE: Final = 8 << 20
_PIECES_AT_ONCE: Final = 4

_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Options of the HTTP client: obstore takes them separately, and panics if they are among a backend's."""

_PANIC: Final = "PanicException"
"""A failed assertion of the library, which is no ``Exception``, and has no class that could be imported."""

_ADVICE: Final = "start processes that use object stores with 'spawn' or 'forkserver'"

_used_in: Origin | None = None
"""The process that first used any client: all share threads, which do not survive a fork."""


@bound_to_process(keep=("url",))
class ObstoreStore:
    """Any ``obstore`` backend. The client is created by the first call, so opening is safe before a fork."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None, *, client: Any = None) -> None:
        """Connects on first use; ``options`` are obstore's configuration names for the backend."""
        scheme, mark, place = url.partition("://")
        self.url = f"{scheme}{mark}{place.rstrip('/')}"
        """The address of this store."""
        self._options = dict(options or {})
        self._client = client
        self._origin: Origin | None = None
        if client is not None:
            self._origin = Origin(f"The store {self.url}", self, advice=_ADVICE)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._client, MemoryStore):
            raise InvalidInput(
                f"{self.url} is in this process's memory and cannot be sent to another one; "
                "use a file:// or bucket address for that."
            )
        return (ObstoreStore, (self.url, self._options))

    def __repr__(self) -> str:
        return f"ObstoreStore({self.url!r})"

    def _connected(self) -> Any:
        global _used_in  # noqa: PLW0603 - one value per process
        if _used_in is None:
            _used_in = Origin("The client library of object stores", advice=_ADVICE)
        _used_in.check()
        if self._client is None:
            self._client = self._connect()
            self._origin = Origin(f"The store {self.url}", self, advice=_ADVICE)
        return self._client

    def _connect(self) -> Any:
        config: dict[str, str] = {}
        for_client: dict[str, str] = {}
        for name, value in self._options.items():
            known = _client_option(name)
            if known is None:
                config[name] = value
            else:
                for_client[known] = value
        connect: Any = from_url
        try:
            # Only storage.retry retries: a client that repeats a conditional write would turn its own success into a
            # conflict.
            return connect(
                self.url, config=config or None, client_options=for_client or None, retry_config={"max_retries": 0}
            )
        except (refusals.BaseError, ValueError) as error:
            raise StorageError(
                f"{self.url} cannot be opened with these options: {classify(error).said}. Correct the options, or "
                "their environment variables."
            ) from error

    def _call(self, path: str, action: Callable[[Any], R]) -> R:
        client = self._connected()
        try:
            return action(client)
        except ValueError as error:
            raise InvalidInput(f"The store cannot do this with {self.url}/{path}: {classify(error).said}.") from error
        except (refusals.BaseError, OSError, NotImplementedError) as error:
            raise classify(error).error(self.url, path) from error
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise StorageError(
                f"The client library of object stores gave up at {self.url}/{path} ({str(error)[:100]}): look for line "
                "breaks, spaces and letters that are not ASCII in the options, or in the environment variables of the "
                "cloud."
            ) from error

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``."""

        def action(client: Any) -> Object:
            result = obstore.get(client, path)
            version = _token(result.meta)
            check_whole(result.meta["size"], self.url, path)
            return Object(memoryview(result.bytes()), lambda: version)

        return self._call(path, action)

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        """Exactly ``length`` bytes from ``start``."""
        if length == 0:
            # obstore refuses empty ranges.
            if start > self._call(path, lambda client: obstore.head(client, path))["size"]:
                raise InvalidInput(f"{self.url}/{path} ends before byte {start}.")
            return memoryview(b"")
        data = memoryview(self._call(path, lambda client: obstore.get_range(client, path, start=start, length=length)))
        if len(data) != length:
            raise InvalidInput(f"{self.url}/{path} ends before byte {start + length}.")
        return data

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing an existing object; durable when the store acknowledges."""
        parts = payload_parts(data)
        # By default obstore uploads every list of buffers in parts: three requests instead of one.
        pieces = sum(len(part) for part in parts) > _ONE_REQUEST
        try:
            self._call(
                path,
                lambda client: obstore.put(
                    client, path, parts, use_multipart=pieces, chunk_size=_PIECE, max_concurrency=_PIECES_AT_ONCE
                ),
            )
        except (NotFound, AlreadyExists, Conflict) as error:
            raise self._unexpected_answer(path, error) from error

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds."""
        mode: Any = "create" if isinstance(when, Absent) else _update_version(when.version)
        try:
            return _token(self._call(path, lambda client: obstore.put(client, path, payload_parts(data), mode=mode)))
        except (NotFound, AlreadyExists, Conflict, Raced) as error:
            # The same answer has different meanings for the two conditions, which obstore does not distinguish.
            if isinstance(when, Absent):
                if isinstance(error, NotFound):
                    raise self._unexpected_answer(path, error) from error
                if isinstance(error, Conflict):
                    raise AlreadyExists(f"{self.url}/{path} exists already.") from error
                raise
            if isinstance(error, Conflict):
                raise
            raise Conflict(f"{self.url}/{path} is gone or is changed by another writer; read it again.") from error

    def _unexpected_answer(self, path: str, error: StorageError) -> StorageError:
        # This answer does not fit the request: the bucket does not exist, or another object blocks the path.
        said = classify(error.__cause__ or error).said
        return StorageError(f"The store would not write {self.url}/{path}: {said}. Check the address.")

    def copy(self, source: str, target: str) -> None:
        """Copy within the store, which reads and writes nothing here; ``NotFound`` if there is no such object."""
        try:
            self._call(source, lambda client: obstore.copy(client, source, target))
        except (AlreadyExists, Conflict) as error:
            raise self._unexpected_answer(target, error) from error

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose path starts with ``prefix``, in path order."""
        # obstore lists by whole path segments: list the folder, and filter by the prefix.
        folder = prefix.rpartition("/")[0]
        pages = self._call(
            prefix,
            lambda client: obstore.list(client, prefix=folder or None, offset=start_after or None, chunk_size=_PAGE),
        )
        while True:
            page = self._call(prefix, lambda _: next(pages, None))
            if page is None:
                return
            for meta in page:
                # Not every server supports an offset: Azure's emulator returns the whole listing.
                if meta["path"].startswith(prefix) and meta["path"] > start_after:
                    yield ObjectInfo(meta["path"], meta["size"], microseconds(meta["last_modified"]))

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""
        try:
            self._call(path, lambda client: obstore.delete(client, path))
        except NotFound:
            return


def _client_option(name: str) -> str | None:
    """The HTTP client's name of an option, which may have a cloud's prefix or capitals."""
    plain = name.lower()
    for cloud in ("aws_", "azure_", "google_"):
        plain = plain.removeprefix(cloud)
    return plain if plain in _CLIENT_OPTIONS else None


def _token(meta: Any) -> Version:
    if meta["e_tag"] is None and meta["version"] is None:
        raise StorageError("The store names no version for its objects, so it cannot do conditional writes.")
    return Version(f"{meta['version'] or ''}\n{meta['e_tag'] or ''}")


def _update_version(version: Version) -> dict[str, str]:
    number, e_tag = version.split("\n", 1)
    parts = {"version": number, "e_tag": e_tag}
    return {name: value for name, value in parts.items() if value}  # a None field would be a TypeError in obstore
