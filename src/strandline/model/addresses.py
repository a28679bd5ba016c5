"""Addresses, paths and plain names of callers, never with credentials in them; which options hold secrets, by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Final, Self, TypeAlias
from urllib.parse import SplitResult, quote, unquote, urlsplit

from strandline.errors import InvalidInput
from strandline.model.arguments import is_text, kind_of
from strandline.model.arguments import text as texts
from strandline.model.retention import TIER_SLOT

Address: TypeAlias = str | os.PathLike[str]
"""A folder or a store in public calls: a path, or an address such as ``s3://bucket/orders``."""

AddressText: TypeAlias = Annotated[str, kind_of(Address)]
"""The same as text."""

NODE_SCHEMES: Final = ("grpc", "grpc+tls")
"""Schemes of the addresses of nodes."""

_TEXT: Final = texts()

_COLLAPSED: Final = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")

_WITHOUT_SLASHES: Final = re.compile(
    r"(file|memory|wal|s3a?|gs|az|abfss?|grpc(?:\+tls)?|kafka|nats):(?!//)", re.IGNORECASE
)

_SCHEME: Final = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")

_NAMED_SECRETS: Final = r"secret|passw(?:or)?d|passphrase|pwd|token|signature|credential|access[_-]?key|api[_-]?key"
"""A regular expression that the names of most secrets match, in options and in the query of an address."""

_SECRET: Final = re.compile(
    rf"{_NAMED_SECRETS}|(?:^|[_.-])sas(?:[_.-]|$)|keys?(?:[_.-](?:base64|pem|data|text))?$", re.IGNORECASE
)
_ABOUT_ONE: Final = re.compile(
    r"[_.-](?:id|file|path|location|type|enabled|host|ur[il])$|application_credentials$|skip_signature$", re.IGNORECASE
)
"""Names of what is said about a secret: which one it is, or in which file."""

_SECRET_PARAMETER: Final = re.compile(rf"(?:^|[&;])(?:[\w.-]*(?:{_NAMED_SECRETS})[\w.-]*|sig)=", re.IGNORECASE)
"""A query parameter that holds a secret: of a signed address, or with a suspicious name."""

_CONTAINERS: Final = frozenset({"abfs", "abfss", "az", "azure", "adl", "wasb", "wasbs"})
"""Schemes in which the name before the @ is a container."""


def as_address(address: Address) -> str:
    """The path or address as text; ``InvalidInput`` for anything that is neither text nor a path object, or empty.

    An address in a path object is refused, too: ``s3://bucket`` has become ``s3:/bucket`` there, which
    would be a folder. So is an address without its slashes, such as ``wal:/data/orders``.

    >>> from pathlib import PurePosixPath
    >>> as_address("s3://bucket/orders"), as_address(PurePosixPath("/data/orders"))
    ('s3://bucket/orders', '/data/orders')
    """
    text = os.fspath(address) if isinstance(address, os.PathLike) else address
    if not isinstance(text, str):
        kind = None if address is None else type(address).__name__
        raise InvalidInput(f"A path or an address is text or a path object (str or os.PathLike), not {kind}.")
    _TEXT.check(text, "A path or an address")
    if not text or "\0" in text:
        raise InvalidInput(f"{text!r} is no path or address: give a path, or an address such as s3://bucket/orders.")
    if not is_text(text, name_of_file="://" not in text):
        raise InvalidInput(f"{text!a} holds half a surrogate pair, which no path or address can: correct it.")
    if text is not address and _COLLAPSED.match(text):
        raise InvalidInput(f"A path object cannot hold an address: this one became {text!r}. Give the address as text.")
    if found := _WITHOUT_SLASHES.match(text):
        # Only the scheme is shown: addresses may hold credentials.
        scheme = found[1]
        raise InvalidInput(
            f"An address begins with {scheme}://, not with {found[0]!r} alone: write {scheme}://…, or ./{scheme}:… for "
            "a folder of that name."
        )
    if "://" in text:
        split_address(text)
    return text


def split_address(address: str) -> SplitResult:
    """The parts of an address; ``InvalidInput`` for one that cannot be split, such as ``s3://[``.

    >>> split_address("s3://bucket/orders").path
    '/orders'
    """
    try:
        return urlsplit(address)
    except ValueError as error:
        raise InvalidInput(f"{address!r} is no address ({error}): write one such as s3://bucket/orders.") from error


@dataclass(frozen=True, slots=True)
class ParsedAddress:
    """What an address says by itself: its scheme, and the folder of this machine that it names."""

    text: str
    scheme: str
    """In lower case; that of a path is ``file``."""

    @classmethod
    def of(cls, address: Address) -> Self:
        """Parse an address; ``InvalidInput`` where :func:`as_address` raises it.

        >>> ParsedAddress.of("data/orders").scheme, ParsedAddress.of("grpc+tls://db1:7007").is_node
        ('file', True)
        """
        text = as_address(address)
        return cls(text, split_address(text).scheme if "://" in text else "file")

    @property
    def is_node(self) -> bool:
        """Whether it is that of a node, or of several."""
        return self.scheme in NODE_SCHEMES

    @property
    def is_wal(self) -> bool:
        """Whether it says that the folder is one of a write-ahead log."""
        return self.scheme == "wal"

    @property
    def folder(self) -> str | None:
        """The folder of this machine that it names; None for a bucket, a node, or memory.

        >>> [ParsedAddress.of(text).folder for text in ("file:///data/a", "data/a", "wal:///data/a", "s3://bucket/a")]
        ['/data/a', 'data/a', '/data/a', None]
        """
        if "://" not in self.text:
            return self.text
        if self.is_wal:
            parts = split_address(self.text)
            if parts.netloc or not parts.path.strip("/"):
                raise InvalidInput(f"{self.text!r} names no folder of this machine: write wal:///absolute/path.")
        return local_path(self.text) or None if self.scheme in ("file", "wal") else None


def local_path(address: str) -> str:
    """The path in a ``file://`` or ``wal://`` address; ``InvalidInput`` for a host, a query or a fragment.

    >>> local_path("file:///data/orders%231")
    '/data/orders#1'
    >>> local_path("file://data/orders")
    Traceback (most recent call last):
    strandline.errors.InvalidInput: 'file://data/orders' names the machine 'data': write file:///path/to/folder.
    """
    parts = split_address(address)
    if parts.netloc not in ("", "localhost"):
        raise InvalidInput(f"{address!r} names the machine {parts.netloc!r}: write {parts.scheme}:///path/to/folder.")
    if found := re.search("[?#]", address):
        raise InvalidInput(f"{address!r} has a {found[0]!r}, and what follows it is no path: write {quote(found[0])}.")
    return unquote(parts.path)


def as_folder(path: Address) -> str:
    """The path of a local folder as text; ``InvalidInput`` for an address, and where :func:`as_address` raises it.

    Used as a path, an address would create a folder called ``s3:`` or ``file:``.

    >>> as_folder("data/orders")
    'data/orders'
    >>> as_folder("file:///data/orders")
    Traceback (most recent call last):
    strandline.errors.InvalidInput: This needs a folder of this machine, and file://… is an address: give a path.
    """
    text = as_address(path)
    if found := _SCHEME.match(text):
        # Only the scheme is shown: addresses may hold credentials.
        raise InvalidInput(f"This needs a folder of this machine, and {found[0].strip()}… is an address: give a path.")
    return text


def refuse_credentials(url: str, remedy: str) -> None:
    """``InvalidInput`` for an address with a user, a key, a password or a signature in it, which the error omits.

    Addresses appear in logs, metrics, error messages and shell histories. ``remedy`` says where the credentials
    belong instead.

    >>> refuse_credentials("s3://bucket/logs", "")
    >>> refuse_credentials("abfss://container@account.dfs.core.windows.net/logs", "")
    """
    if "://" not in url:
        return
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0].partition("?")[0].partition("#")[0]
    if _SECRET_PARAMETER.search(rest.partition("?")[2]):
        raise InvalidInput(
            f"The address {scheme}://…?… has credentials in its query, which would appear wherever addresses do: "
            f"take them out, and {remedy}."
        )
    known, found, host = authority.rpartition("@")
    # A secret may contain a slash: then the @ is in what looks like the path.
    if not found and ":" in authority and not authority.rpartition(":")[2].isdecimal() and "@" in rest:
        known, found, host = authority, "@", "…"
    if not found or (scheme in _CONTAINERS and ":" not in known):
        return
    raise InvalidInput(
        f"The address {scheme}://…@{host} has credentials in it, which would appear wherever addresses do: take them "
        f"out, and {remedy}."
    )


def has_credentials(text: str) -> bool:
    """Whether a text is an address that :func:`refuse_credentials` refuses.

    >>> has_credentials("http://user:word@proxy:3128"), has_credentials("http://proxy:3128"), has_credentials("eu")
    (True, False, False)
    """
    try:
        refuse_credentials(text, "")
    except InvalidInput:
        return True
    return False


BOOTSTRAP_SUFFIX: Final = ".bootstrap"
"""Suffix of the slot that pins the log while a replica bootstraps, after the replica's name."""

CONSUMER_SUFFIX: Final = ".consumer"
"""Suffix of a consumer's slot on a node, after the consumer's name. Slots without it belong to replicas."""

COPIED_SUFFIX: Final = ".copied"
"""Suffix of a replica's copy of a consumer's slot, after the name of the slot on the primary."""

PLAIN_NAME: Final = r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z"
"""A regular expression for what :func:`is_plain_name` is true for."""


def is_plain_name(name: str) -> bool:
    r"""Whether a text is one file name on every system, and nothing else: no path, no ``..``, no hidden file.

    >>> [is_plain_name(name) for name in ("replica-1", "a.b", "..", "a/b", "", ".a", "a\n")]
    [True, True, False, False, False, False, False]
    """
    return re.search(PLAIN_NAME, name) is not None


def check_plain_name(name: str, what: str) -> str:
    """The name; ``InvalidInput`` if it is not plain. ``what`` is the kind of the named thing."""
    if not is_plain_name(name):
        raise InvalidInput(
            f"{name[:200]!r} cannot name a {what}: use up to 128 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit."
        )
    return name


def check_replica_name(name: str) -> str:
    """The name; ``InvalidInput`` if a replica cannot have it: not a plain name, or that of a slot of the log itself."""
    check_plain_name(name, "replica")
    if name == TIER_SLOT or name.endswith((BOOTSTRAP_SUFFIX, CONSUMER_SUFFIX, COPIED_SUFFIX)):
        raise InvalidInput(f"{name!r} cannot name a replica: the log's own slots have such names. Use another name.")
    return name


def is_secret_option(name: str) -> bool:
    """Whether the value of an option is a secret: by its name, with or without that of a cloud, in any case.

    >>> [is_secret_option(name) for name in ("account_key", "AZURE_STORAGE_SAS_TOKEN", "sse_customer_key_base64")]
    [True, True, True]
    >>> [is_secret_option(name) for name in ("aws_access_key_id", "application_credentials", "region")]
    [False, False, False]
    """
    return _SECRET.search(name) is not None and _ABOUT_ONE.search(name) is None
