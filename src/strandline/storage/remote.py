"""Object stores of the clouds, and the in-process one, through ``obstore``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions as refusals
from obstore.store import MemoryStore, from_url

from strandline.model.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    NotFound,
    StorageError,
    TransientStorageError,
    UsedAcrossFork,
)
from strandline.storage.store import Absent, Object, ObjectInfo, Payload, Precondition, Version, payload_parts

R = TypeVar("R")

_FINAL: Final[tuple[type[Exception], ...]] = (
    refusals.PermissionDeniedError,
    refusals.UnauthenticatedError,
    refusals.NotSupportedError,
    refusals.InvalidPathError,
    refusals.UnknownConfigurationKeyError,
    NotImplementedError,
)

_PAGE = 1000

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
"""Options of the HTTP client: obstore takes them apart from a backend's own, and panics if it finds them there."""

_used_in: int | None = None
"""The process that first used any client: all share one set of threads, which do not live on in a forked child."""


class ObstoreStore:
    """Any ``obstore`` backend. The client is made at the first call, so that opening is safe before a fork."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None, *, client: Any = None) -> None:
        """Remember where to connect; ``options`` are obstore's own configuration names for the backend."""
        scheme, mark, place = url.partition("://")
        self._url = f"{scheme}{mark}{place.rstrip('/')}"
        self._options = dict(options or {})
        self._client = client
        self._process = os.getpid() if client is not None else None

    @property
    def url(self) -> str:
        """Where this store is."""
        return self._url

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._client, MemoryStore):
            raise InvalidInput(
                f"{self._url} lives in this process's memory and cannot be sent to another one; "
                "use a file:// or bucket address for that."
            )
        return (ObstoreStore, (self._url, self._options))

    def __repr__(self) -> str:
        return f"ObstoreStore({self._url!r})"

    def _connected(self) -> Any:
        global _used_in  # noqa: PLW0603 - what it tells is true of the whole process
        process = os.getpid()
        for user in (self._process, _used_in):
            if user not in (None, process):
                raise UsedAcrossFork(
                    f"{self._url} cannot be used in process {process}: object stores were used in process {user} "
                    "before that forked, and would hang in the child. Start processes with 'spawn' or 'forkserver'."
                )
        _used_in = process
        if self._process is not None:
            return self._client
        # Retries belong to one place, storage.retry: a client that blindly repeats a conditional write would turn
        # its own success into a conflict.
        connect: Any = from_url
        client_options = {name: value for name, value in self._options.items() if name in _CLIENT_OPTIONS}
        config = {name: value for name, value in self._options.items() if name not in _CLIENT_OPTIONS}
        self._client = connect(
            self._url, config=config or None, client_options=client_options or None, retry_config={"max_retries": 0}
        )
        self._process = process
        return self._client

    def _call(self, path: str, action: Callable[[Any], R]) -> R:
        try:
            return action(self._connected())
        except FileNotFoundError as error:
            raise NotFound(f"There is no object {self._url}/{path}.") from error
        except refusals.NotFoundError as error:
            raise NotFound(f"There is no object {self._url}/{path}.") from error
        except refusals.AlreadyExistsError as error:
            raise AlreadyExists(f"{self._url}/{path} exists already.") from error
        except (refusals.PreconditionError, refusals.NotModifiedError) as error:
            raise Conflict(f"{self._url}/{path} was changed by someone else; read it again.") from error
        except ValueError as error:
            raise InvalidInput(f"The store cannot do this with {self._url}/{path}: {_first_line(error)}.") from error
        except _FINAL as error:
            raise StorageError(
                f"The store refused {self._url}/{path}: {_first_line(error)}. Retrying does not help."
            ) from error
        except (refusals.BaseError, OSError) as error:
            raise TransientStorageError(
                f"The store failed at {self._url}/{path}: {_first_line(error)}. Retrying may help."
            ) from error

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``."""

        def action(client: Any) -> Object:
            result = obstore.get(client, path)
            version = _token(result.meta)
            return Object(memoryview(result.bytes()), lambda: version)

        return self._call(path, action)

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        """Exactly ``length`` bytes from ``start``."""
        if length == 0:
            # obstore refuses to ask for nothing.
            if start > self._call(path, lambda client: obstore.head(client, path))["size"]:
                raise InvalidInput(f"{self._url}/{path} ends before byte {start}.")
            return memoryview(b"")
        try:
            data = memoryview(
                self._call(path, lambda client: obstore.get_range(client, path, start=start, length=length))
            )
        except TransientStorageError:
            # obstore reports a range past the end like any other failure; look before calling it transient.
            size = self._call(path, lambda client: obstore.head(client, path))["size"]
            if start + length <= size:
                raise
            data = memoryview(b"")
        if len(data) != length:
            raise InvalidInput(f"{self._url}/{path} ends before byte {start + length}.")
        return data

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing what is there; the store's own acknowledgement is what makes it durable."""
        self._call(path, lambda client: obstore.put(client, path, payload_parts(data)))

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds."""
        mode: Any = "create" if isinstance(when, Absent) else _update_version(when.version)
        try:
            return _token(self._call(path, lambda client: obstore.put(client, path, payload_parts(data), mode=mode)))
        except NotFound as error:
            raise Conflict(f"{self._url}/{path} is gone; read it again.") from error

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose path starts with ``prefix``, in path order."""
        # obstore lists by whole path segments: ask for the folder, keep what really begins with the prefix.
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
                if meta["path"].startswith(prefix):
                    yield ObjectInfo(meta["path"], meta["size"])

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""
        try:
            self._call(path, lambda client: obstore.delete(client, path))
        except NotFound:
            return


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _token(meta: Any) -> Version:
    if meta["e_tag"] is None and meta["version"] is None:
        raise StorageError("The store names no version for its objects, so that it cannot do conditional writes.")
    return Version(f"{meta['version'] or ''}\n{meta['e_tag'] or ''}")


def _update_version(version: Version) -> dict[str, str]:
    number, e_tag = version.split("\n", 1)
    parts = {"version": number, "e_tag": e_tag}
    return {name: value for name, value in parts.items() if value}  # a None field would be a TypeError in obstore
