"""Values of settings: lengths of time, sizes, places to listen on, and secrets that are written elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from strandline.errors import InvalidInput
from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.retention import parse_bytes, parse_retention, parse_seconds
from strandline.storage.disk import Disk

_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):(\d{1,5})")
_ORIGIN: Final = re.compile(r"\*|https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")
_HIGHEST_PORT: Final = 65535
_LONGEST: Final = 10**9
"""About 31 years: what waits takes no longer time."""


class Seconds(float):
    """A length of time: ``"10m"``, or a number of seconds."""

    __slots__ = ()


class Bytes(int):
    """A size: ``"256MiB"``, or a number of bytes."""

    __slots__ = ()


class Listen(str):
    """A host and a port to listen on, such as ``127.0.0.1:7700`` or ``[::1]:0``."""

    __slots__ = ()

    @property
    def place(self) -> tuple[str, int]:
        """Host and port.

        >>> Listen("[::1]:0").place
        ('::1', 0)
        """
        host, _, port = self.rpartition(":")
        return host.strip("[]"), int(port)


class PageOrigin(str):
    """The origin of pages as a browser names it, ``https://app.example``; or ``*`` for any."""

    __slots__ = ()


class Policy(str):
    """A retention policy: ``forever``, ``consumed``, ``age:7d`` or ``bytes:100GiB``."""

    __slots__ = ()


class Start(str):
    """Where a new follower begins: ``beginning``, ``retained``, ``now``, an offset, or a time such as 2026-01-31."""

    __slots__ = ()


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that is written elsewhere: in an environment variable, or alone in a file. It is never shown."""

    env: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if (self.env is None) == (self.file is None):
            raise ValueError('a secret is { env = "NAME" } or { file = "PATH" }')

    def read(self, environment: Mapping[str, str], disk: Disk) -> str:
        """The value; ``InvalidInput`` if it is not there.

        >>> Secret(env="TOKEN").read({"TOKEN": "x"}, None)
        'x'
        """
        if self.env is not None:
            if self.env not in environment:
                raise InvalidInput(f"The environment has no variable {self.env}: set it for this process.")
            return environment[self.env]
        try:
            return disk.read(str(self.file)).decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise InvalidInput(f"The file {self.file} is no text in UTF-8: write the secret into it, alone.") from None

    @property
    def source(self) -> str:
        """Where it is written."""
        return f"the environment variable {self.env}" if self.env is not None else f"the file {self.file}"


Options = dict[str, str | Secret]
"""Settings of a store or a client by its own names."""


def revealed(options: Mapping[str, str | Secret], environment: Mapping[str, str], disk: Disk) -> dict[str, str]:
    """Options with their secrets, for whoever opens something with them."""
    return {
        name: value.read(environment, disk) if isinstance(value, Secret) else value for name, value in options.items()
    }


def decoded(kind: type[Any], value: Any) -> Any:
    """A value of one of these kinds; ``ValueError`` with what is wanted."""
    if kind is Seconds:
        return Seconds(_quantity(value, parse_seconds, "a time such as '10m'", _LONGEST))
    if kind is Bytes:
        return Bytes(_quantity(value, parse_bytes, "a size such as '256MiB'", LARGEST_NUMBER))
    if not isinstance(value, str):
        raise ValueError("it is a text")  # noqa: TRY004 - msgspec adds the place to a ValueError
    if kind is Listen:
        found = _PLACE.fullmatch(value)
        if found is None or int(found[2]) > _HIGHEST_PORT:
            raise ValueError(f"{value!r} is no address to listen on: write host:port, such as 127.0.0.1:7700")
        return Listen(value)
    if kind is PageOrigin:
        if _ORIGIN.fullmatch(value) is None:
            raise ValueError(f"{value!r} is no origin: write it as browsers do, such as https://app.example, or '*'")
        return PageOrigin(value)
    if kind is Policy:
        return Policy(parse_retention(value))
    if kind is Start:
        return Start(value)
    raise NotImplementedError(kind)


def _quantity(value: Any, parse: Any, wanted: str, largest: int) -> float:
    found = parse(value) if isinstance(value, str) else value
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found <= largest:
        return found
    raise ValueError(f"{value!r} is not {wanted}")
