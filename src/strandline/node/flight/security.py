"""Authentication and authorisation: certificates, tokens, roles, and on which addresses a node may listen."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

from strandline.errors import InvalidInput
from strandline.model.addresses import is_plain_name
from strandline.model.arguments import Secret, checked
from strandline.storage.disk import Disk
from strandline.storage.env import SYSTEM, Env

HEADER: Final = "authorization"
_SCHEME: Final = "bearer"
_TICKET: Final = "ticket"
_SHORTEST_TOKEN: Final = 16
_HASHED: Final = "sha256:"
_COLUMNS: Final = 3


class Role(StrEnum):
    """Role of a caller: which calls it may make."""

    REPLICA = "replica"
    """Follow the log and acknowledge under its own name; ask other nodes for their election report."""
    CLIENT = "client"
    """Read up to the watermark, append, and look at the topology."""
    ADMIN = "admin"
    """Everything that a client may; promote; unregister any replica; order a replica to bootstrap again."""
    READ = "read"
    """Only read up to the watermark."""
    APPEND = "append"
    """Only append."""
    CONSUME = "consume"
    """Read, and create, move and drop slots."""


READERS: Final = (Role.REPLICA, Role.CLIENT, Role.ADMIN, Role.READ, Role.CONSUME)
APPENDERS: Final = (Role.CLIENT, Role.ADMIN, Role.APPEND)
CONSUMERS: Final = (Role.CLIENT, Role.ADMIN, Role.CONSUME)
EVERYBODY: Final = tuple(Role)


class Scope(NamedTuple):
    """A role on some logs only, and if it consumes, with some slots only. A ``*`` at the end stands for any rest."""

    role: Role
    log: str
    slot: str = ""

    @classmethod
    def parse(cls, text: str) -> Scope:
        """A scope from ``ROLE:LOG``, or ``consume:LOG/SLOT``; ``ValueError`` for another text.

        >>> Scope.parse("consume:orders-*/billing")
        Scope(role=<Role.CONSUME: 'consume'>, log='orders-*', slot='billing')
        """
        role, _, place = text.partition(":")
        log, _, slot = place.partition("/")
        found = cls(Role(role), log, slot)
        is_named = all(is_plain_name(name.removesuffix("*") or "a") for name in (log, slot or "a")) and bool(log)
        if not is_named or found.role is Role.REPLICA or (slot and found.role is not Role.CONSUME):
            raise ValueError(text)
        return found


@dataclass(frozen=True, slots=True)
class Grant:
    """A known caller and its roles: on all logs, and those that it has on some."""

    name: str
    roles: frozenset[Role]
    scopes: tuple[Scope, ...] = ()

    def may(self, *roles: Role) -> bool:
        """Whether it has one of these roles."""
        return not self.roles.isdisjoint(roles)

    def may_consume(self, slot: str) -> bool:
        """Whether it may create, move and drop the slot of this name."""
        return self.may(*CONSUMERS) or any(_matches(scope.slot, slot) for scope in self.scopes if not scope.log)

    def on(self, log: str) -> Grant:
        """The grant on the log of this name.

        >>> grant = Grant("a", frozenset(), (Scope.parse("append:orders-*"), Scope.parse("consume:orders-eu/b")))
        >>> grant.on("orders-eu").may(Role.APPEND), grant.on("payments").may(Role.APPEND)
        (True, False)
        >>> grant.on("orders-eu").may_consume("b"), grant.on("orders-eu").may_consume("c")
        (True, False)
        """
        here = [scope for scope in self.scopes if _matches(scope.log, log)]
        roles = self.roles | {scope.role if not scope.slot else Role.READ for scope in here}
        return Grant(self.name, roles, tuple(Scope(scope.role, "", scope.slot) for scope in here if scope.slot))


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


_USUAL: Final = frozenset({Role.CLIENT})
"""Roles of a certificate without an entry: no term and no acknowledgement is accepted from it."""
_OF_MEMBERS: Final = frozenset({Role.REPLICA, Role.CLIENT})
"""Roles of the certificate of a node of the log."""


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """Tokens and the grant of each. Only hashes are stored; neither is ever printed or logged."""

    grants: tuple[tuple[bytes, Grant], ...]
    """Pairs of a token's SHA-256 and its grant."""

    def __post_init__(self) -> None:
        if len({digest for digest, _ in self.grants}) < len(self.grants):
            raise InvalidInput("A token is given twice: each belongs to one name.")

    def __repr__(self) -> str:
        return f"Tokens(of {sorted({grant.name for _, grant in self.grants})})"

    @classmethod
    def parse(cls, text: str, where: str) -> Tokens:
        r"""One line each: name, roles with commas, and the token or ``sha256:`` and its hash; ``#`` begins a comment.

        >>> Tokens.parse("replica-1 replica correct-horse-battery\nops client,admin sha256:" + 64 * "0", "tokens")
        Tokens(of ['ops', 'replica-1'])
        """
        grants = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                grants.append(_grant(words))
            except ValueError as error:
                # Neither the line nor its cause is shown: both contain a token.
                raise InvalidInput(f"Line {number} of {where} is no grant: {error}.") from None
        return cls(tuple(grants))

    @classmethod
    def load(cls, path: str, *, env: Env = SYSTEM) -> Tokens:
        """The tokens in a file."""
        try:
            text = env.disk.read(path).decode()
        except UnicodeDecodeError:
            raise InvalidInput(f"{path} is no text in UTF-8: write a line 'name roles token' for each token.") from None
        return cls.parse(text, path)

    def on(self, log: str) -> Tokens:
        """The same tokens, with what each may on the log of this name."""
        return Tokens(tuple((digest, grant.on(log)) for digest, grant in self.grants))

    def find(self, headers: Mapping[str, list[str]]) -> Grant | None:
        """The grant of the token in these headers. Unknown tokens take as long as known ones."""
        values = headers.get(HEADER, [])
        scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
        digest = hashlib.sha256(token.strip().encode(errors="replace")).digest()
        found = None
        for known, grant in self.grants:
            if hmac.compare_digest(known, digest):
                found = grant
        return found if scheme.lower() == _SCHEME else None


def ticket_in(headers: Mapping[str, list[str]]) -> str | None:
    """The signed ticket in these headers, if there is one."""
    values = headers.get(HEADER, [])
    scheme, _, ticket = (values[0] if len(values) == 1 else "").partition(" ")
    return ticket.strip() if scheme.lower() == _TICKET else None


def _grant(words: list[str]) -> tuple[bytes, Grant]:
    if len(words) != _COLUMNS:
        raise ValueError(f"it has {len(words)} words instead of a name, roles and a token")
    name, roles, token = words
    try:
        given = roles.split(",")
        scopes = tuple(Scope.parse(word) for word in given if ":" in word)
        grant = Grant(name, frozenset(Role(word) for word in given if ":" not in word), scopes)
    except ValueError:
        raise ValueError(
            f"the roles are {', '.join(Role)}, with commas between them, and with :LOG or consume:LOG/SLOT only there"
        ) from None
    if token.startswith(_HASHED):
        digest = bytes.fromhex(token.removeprefix(_HASHED))
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError("a SHA-256 has 64 digits")
        return digest, grant
    if len(token) < _SHORTEST_TOKEN or not is_token(token):
        raise ValueError(f"a token has at least {_SHORTEST_TOKEN} plain letters")
    return hashlib.sha256(token.encode()).digest(), grant


def parse_identities(given: Iterable[str]) -> dict[str, frozenset[Role]]:
    """The roles of certificates by the name that they are for, from texts ``NAME=ROLE,ROLE``.

    >>> sorted(parse_identities(["b=replica", "ops=client,admin"])["ops"])
    [<Role.ADMIN: 'admin'>, <Role.CLIENT: 'client'>]
    """
    found: dict[str, frozenset[Role]] = {}
    for text in given:
        name, _, roles = text.rpartition("=")
        try:
            if not name or name in found:
                raise ValueError(name)  # noqa: TRY301 - one sentence for all
            found[name] = frozenset(Role(role) for role in roles.split(","))
        except ValueError:
            raise InvalidInput(
                f"{text!r} names no identity: write NAME=ROLE[,ROLE] once for each, where NAME is the first "
                f"alternative name of a certificate, or its common name, and the roles are {', '.join(Role)}."
            ) from None
    return found


def is_token(text: str) -> bool:
    """Whether a text can be sent in a header."""
    return text.isascii() and text.isprintable() and " " not in text


@checked
@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """How a node authenticates its callers. Certificates and keys are PEM."""

    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    client_roots: bytes | None = None
    """Only clients with a certificate that one of these signed may connect."""
    tokens: Tokens | None = None
    """Only callers with one of these may call; the token then gives the name and the roles."""
    identities: Mapping[str, frozenset[Role]] = field(default_factory=lambda: MappingProxyType({}))
    """Without tokens: roles by certificate name; else the log's nodes are replicas, and every other caller a client."""
    reread: Callable[[], ServerSecurity] | None = field(default=None, repr=False, compare=False)
    """Reads the files again from which :meth:`load` has made this; None for a value that was given."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("TLS needs both a certificate and its key.")
        if self.identities and (self.client_roots is None or self.tokens is not None):
            raise InvalidInput(
                "Identities name certificates, which are checked only with client_roots and without tokens: with "
                "tokens, the tokens give the roles."
            )
        if self.client_roots is not None and self.certificate is None:
            raise InvalidInput("Clients can send certificates only over TLS: give the node a certificate and a key.")

    @classmethod
    def load(
        cls,
        *,
        certificate: str | None = None,
        key: str | None = None,
        client_roots: str | None = None,
        tokens: str | None = None,
        identities: Mapping[str, frozenset[Role]] = MappingProxyType({}),
        env: Env = SYSTEM,
    ) -> ServerSecurity:
        """Read each of them from a file; a node reads the files again every few seconds."""
        again = partial(
            cls.load, certificate=certificate, key=key, client_roots=client_roots, tokens=tokens, identities=identities,
            env=env,
        )  # fmt: skip
        known = None if tokens is None else Tokens.load(tokens, env=env)
        pair = _read_pair(certificate, key, env.disk)
        return cls(*pair, _read(client_roots, env.disk), known, identities, again)

    def on(self, log: str) -> ServerSecurity:
        """The same for the log of this name: tokens may be for some logs only."""
        if self.tokens is None:
            return self
        again = self.reread
        reread = None if again is None else lambda: again().on(log)
        return replace(self, tokens=self.tokens.on(log), reread=reread)

    @property
    def is_encrypted(self) -> bool:
        """Whether connections use TLS."""
        return self.certificate is not None

    def grant_of(self, identity: str, *, is_member: bool = False) -> Grant:
        """The grant of a certificate; ``is_member`` if it is that of a node of the log."""
        return Grant(identity, self.identities.get(identity, _OF_MEMBERS if is_member else _USUAL))


@checked
@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """How a client authenticates itself and the node. Certificates and keys are PEM."""

    roots: bytes | None = None
    """The roots that must have signed the node's certificate; None for those of the system."""
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    token: Secret | None = field(default=None, repr=False)
    hostname: str | None = None
    """The name in the node's certificate, if that is not the one in its address."""
    insecure: bool = False
    """Whether the token may be sent to another machine without TLS."""
    reread: Callable[[], ClientSecurity] | None = field(default=None, repr=False, compare=False)
    """Reads the files again from which :meth:`load` has made this; None for a value that was given."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("A client's certificate needs its key, and the other way round.")
        if self.token is not None and not is_token(self.token):
            raise InvalidInput("A token has plain letters only, without spaces or line breaks.")

    @classmethod
    def load(
        cls,
        *,
        roots: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        token: str | None = None,
        hostname: str | None = None,
        env: Env = SYSTEM,
    ) -> ClientSecurity:
        """Read each of them from a file; a node reads the files again when it connects to another one."""
        again = partial(
            cls.load, roots=roots, certificate=certificate, key=key, token=token, hostname=hostname, env=env
        )
        word = _read(token, env.disk)
        text = None if word is None else word.decode(errors="replace").strip()
        return cls(_read(roots, env.disk), *_read_pair(certificate, key, env.disk), text, hostname, reread=again)


def _read_pair(certificate: str | None, key: str | None, disk: Disk) -> tuple[bytes | None, bytes | None]:
    """A certificate and its key; ``InvalidInput`` if they do not belong together: one may not be replaced yet."""
    pair = (_read(certificate, disk), _read(key, disk))
    if certificate is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise InvalidInput(f"{certificate} and {key} are no certificate and its key: {error}.") from error
    return pair


def _read(path: str | None, disk: Disk) -> bytes | None:
    return None if path is None else disk.read(path)


def check_listening(host: str, security: ServerSecurity, *, insecure: bool, who: str = "A node") -> None:
    """Refuse to listen on an address for other machines without authentication and encryption."""
    if insecure or is_loopback(host):
        return
    if security.tokens is None and security.client_roots is None:
        missing = "anybody could read, append and promote: give it tokens, or the authority of its clients"
    elif not security.is_encrypted:
        missing = "tokens would be sent in plain text: give it a certificate and a key"
    else:
        return
    raise InvalidInput(
        f"{who} on {host} can be reached by other machines, and {missing}; or listen on 127.0.0.1"
        f"{', or allow it (--insecure)' if who == 'A node' else ''}."
    )


def check_calling(host: str, security: ClientSecurity, *, encrypted: bool) -> None:
    """Refuse to send a token over a plain connection, and certificates that a plain connection would ignore."""
    if encrypted:
        return
    if security.roots is not None or security.certificate is not None:
        raise InvalidInput(f"Certificates are used over TLS only: call {host} as grpc+tls://.")
    if security.token is not None and not (security.insecure or is_loopback(host)):
        raise InvalidInput(
            f"The token would be sent to {host} in plain text: call it as grpc+tls://, or allow it (insecure)."
        )


def is_loopback(host: str) -> bool:
    """Whether a host is the loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
