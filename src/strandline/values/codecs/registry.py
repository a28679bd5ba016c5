"""Schema registries: schemas by id, out of a mapping or from a server over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
from collections.abc import Mapping
from typing import Any, Final

from strandline.errors import InvalidInput, TransientStorageError
from strandline.storage.http_get import ServerName, http_get, server_of

_TIMEOUT: Final = 10.0
_MOST_BYTES: Final = 4 << 20
_MOST_UNKNOWN: Final = 100
_NOT_FOUND: Final = 404

SETTING: Final = "STRANDLINE_REGISTRIES"
"""The environment variable with the addresses of registries that a log may name, separated by commas."""

_named: set[ServerName] = set()
"""Servers that this process was told to call by its own program, and not by a log."""


class RecordedAddress(str):
    """The address of a registry out of a log's identity. It is called only if this process knows it otherwise, too."""

    __slots__ = ()


def open_registry(registry: str | Mapping[int, Any]) -> MappedRegistry | HttpRegistry:
    """The registry of a mapping, or at an address."""
    if isinstance(registry, str):
        return HttpRegistry(registry)
    if not isinstance(registry, Mapping):
        raise InvalidInput(f"registry is an address or a mapping of ids to schemas, not {registry!r:.100}.")
    return MappedRegistry(registry)


class MappedRegistry:
    """Schemas out of a mapping by their ids, which never change."""

    def __init__(self, schemas: Mapping[int, Any]) -> None:
        if not all(type(number) is int and isinstance(text, str | Mapping) for number, text in schemas.items()):
            raise InvalidInput("registry maps ids, which are whole numbers, to Avro schemas.")
        self._schemas = {number: _readable(schema) for number, schema in schemas.items()}

    def schema(self, number: int) -> Any:
        """The Avro schema of an id; ``ValueError`` if there is none."""
        if number not in self._schemas:
            raise ValueError(f"The schema {number} is not in the registry")
        return _parsed(self._schemas[number])

    def settings(self) -> Any:
        """The mapping."""
        return self._schemas


class HttpRegistry:
    """A schema registry with Confluent's interface; each schema is fetched once, and kept."""

    def __init__(self, url: str) -> None:
        self._server = server_of(url)
        if self._server.scheme not in ("http", "https") or not self._server.host:
            raise InvalidInput("registry is an address such as https://registry.example:8081.")
        self._is_recorded = isinstance(url, RecordedAddress)
        self._url = url.rstrip("/")
        self._schemas: dict[int, Any] = {}
        self._unknown: set[int] = set()
        if not self._is_recorded:
            _named.add(self._server)

    def schema(self, number: int) -> Any:
        """The Avro schema of an id; ``ValueError`` if there is none, ``TransientStorageError`` if that is unknown."""
        if number not in self._schemas:
            if number in self._unknown:
                raise ValueError(f"The schema {number} is not in the registry")
            self._schemas[number] = _parsed(self._fetched(number))
        return self._schemas[number]

    @property
    def _is_allowed(self) -> bool:
        return not self._is_recorded or self._server in _named or self._server in _listed(os.environ.get(SETTING, ""))

    def _fetched(self, number: int) -> str:
        if not self._is_allowed:
            raise InvalidInput(
                f"The log names the schema registry {self._url[:200]}, and this process was not told to call that: if "
                f"you trust it, add it to the environment variable {SETTING}, or give a codec with it yourself."
            )
        try:
            body = http_get(f"{self._url}/schemas/ids/{number}", seconds=_TIMEOUT, most_bytes=_MOST_BYTES)
        except urllib.error.HTTPError as error:
            if error.code == _NOT_FOUND:
                # Hostile values may name any id, so the number of remembered ones is limited.
                if len(self._unknown) >= _MOST_UNKNOWN:
                    self._unknown.clear()
                self._unknown.add(number)
                raise ValueError(f"The schema {number} is not in the registry") from error
            raise _unavailable(number, f"HTTP status {error.code}") from error
        except (OSError, http.client.HTTPException, ValueError, InvalidInput) as error:  # also of a redirect
            raise _unavailable(number, str(error)) from error
        try:
            text = json.loads(body)["schema"] if len(body) <= _MOST_BYTES else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _unavailable(number, "it answered with something else") from error
        if not isinstance(text, str):
            raise _unavailable(number, "it answered with something else")
        return text

    def settings(self) -> Any:
        """The address. A process that gets a codec from this one may call it, too, if this one may."""
        return self._url if self._is_allowed else RecordedAddress(self._url)


def _listed(text: str) -> set[ServerName]:
    """The servers in the environment variable.

    >>> _listed("https://one.example, http://two.example:8081/") == {
    ...     server_of("https://one.example:443"),
    ...     server_of("http://two.example:8081"),
    ... }
    True
    """
    return {server_of(each.strip()) for each in text.split(",") if each.strip()}


def _readable(schema: Any) -> Any:
    """The parsed schema, so that equal registries are equal; one that is not JSON concerns only values that name it."""
    try:
        return _parsed(schema)
    except (ValueError, RecursionError):
        return schema


def _parsed(schema: Any) -> Any:
    return json.loads(schema) if isinstance(schema, str) else schema


def _unavailable(number: int, why: str) -> TransientStorageError:
    return TransientStorageError(f"The schema {number} could not be fetched from the registry: {why[:200]}. Try again.")
