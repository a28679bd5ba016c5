"""``open``: every kind of log by its address."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, overload

from strandline.compat.v1.log import NamedFormat, QueueLog, open_format
from strandline.errors import InvalidInput, Unsupported
from strandline.log.object.log import ObjectLog, open_log
from strandline.log.read.value_format import NO_FORMAT
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.addresses import NODE_SCHEMES, Address, ParsedAddress, refuse_credentials
from strandline.model.arguments import checked
from strandline.model.content_type import check_same
from strandline.model.retention import Retention, SlotLimits
from strandline.node.flight.client.node_channels import ReadFrom
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectStore
from strandline.tier.opening import tiered
from strandline.tier.read.tiered_log import TieredLog
from strandline.values.contract import Codec

__all__ = ["AddressedLog", "open_url"]

OpenedLog: TypeAlias = ObjectLog | TieredLog | WalLog | WalReader | RemoteLog
"""The kinds of logs that ``open`` returns, by the scheme of the address."""

AddressedLog: TypeAlias = OpenedLog | QueueLog
"""The same, and queues of version 1."""

_KAFKA: Final = "kafka."
_STORES: Final = ("s3", "gs", "az", "file", "memory")
_SCHEMES: Final = (*_STORES, "wal", *NODE_SCHEMES)


@overload
def open_url(
    address: Address | ObjectStore,
    *,
    format: NamedFormat,
    options: Mapping[str, str] | None = ...,
    env: Env = ...,
) -> QueueLog: ...


@overload
def open_url(
    address: Address | ObjectStore,
    *,
    format: None = None,
    create: bool = ...,
    read_only: bool = ...,
    retention: str | Retention | None = ...,
    limits: SlotLimits | None = ...,
    value: Codec | None = ...,
    content_type: str | None = ...,
    options: Mapping[str, str] | None = ...,
    security: ClientSecurity | None = ...,
    read_from: ReadFrom = ...,
    env: Env = ...,
) -> OpenedLog: ...


@checked
def open_url(
    address: Address | ObjectStore,
    *,
    format: NamedFormat | None = None,  # noqa: A002 - as in Spark
    create: bool = False,
    read_only: bool = False,
    retention: str | Retention | None = None,
    limits: SlotLimits | None = None,
    value: Codec | None = None,
    content_type: str | None = None,
    options: Mapping[str, str] | None = None,
    security: ClientSecurity | None = None,
    read_from: ReadFrom = "primary",
    env: Env = SYSTEM,
) -> AddressedLog:
    """Open the log at an address. With a cold tier attached, it is read across both tiers.

    - ``s3://``, ``gs://``, ``az://``, ``file://``, ``memory://``, a path: an object log; many processes append.
    - ``wal:///folder``: a write-ahead log on this machine's disk; one process writes.
    - ``grpc://host:port``, ``grpc+tls://host:port``: the log of a node, over Arrow Flight.
    - ``grpc://host:port,host:port``: the same, on whichever of these nodes leads.

    Args:
        address: The address; for an object log also its store.
        format: ``"queue-v1"`` for a queue of version 1, or a ``sl.compat.QueueFormat`` with other paths.
        create: Create an object log or a write-ahead log if there is none. Otherwise, opening changes nothing.
        read_only: Read a write-ahead log beside the process that writes it.
        retention: What a new object log keeps: ``"forever"`` (by default), ``"consumed"``, ``"age:7d"``,
            ``"bytes:100GiB"``. A log that exists keeps its own.
        limits: How far slots of a new object log may pin.
        value: The codec of the values, such as ``sl.values.Json(schema)``, which a new object log or write-ahead log
            records. A log that exists has to have recorded it, in this version or an older one; ``log.evolve_value``
            adds one.
        content_type: The media type of the values, such as ``"application/json"``, which a new object log or
            write-ahead log records for good. A log that exists has to have the same one.
        options: Settings of the object store, by obstore's names; they win over the environment's. With ``kafka.``
            before them those of the Kafka client, if the events of the cold tier are in Kafka.
        security: The token, and the certificates, for a node.
        read_from: With the addresses of several nodes: read from the ``"primary"``, or from ``"replicas"`` if possible.
        env: Clock, disk and chance, for tests.

    Raises ``NotALog`` if there is none, ``WrongKind`` if something else is there, ``UnsupportedVersion`` if it is newer
    than this program, ``Fenced`` if another process writes the write-ahead log.

    >>> import strandline as sl
    >>> sl.open("memory://doctest-open", create=True).bounds()
    Bounds(first=0, next=0)
    >>> sl.open("grcp://db1:7001")
    Traceback (most recent call last):
    strandline.errors.InvalidInput: There are no logs at grcp://: did you mean grpc://?
    """
    place = None if isinstance(address, ObjectStore) else log_place(address)
    if format is not None:
        return open_format(address, format, options=options, env=env)
    scheme = "file" if place is None else place.scheme
    from_ = None if read_from == "primary" else read_from
    _only(scheme, NODE_SCHEMES, "a node (grpc://)", security=security, read_from=from_)
    _only(scheme, ("wal",), "a write-ahead log (wal://)", read_only=read_only or None)
    _only(scheme, _STORES, "an object log", retention=retention, limits=limits)
    if place is not None and place.is_node:
        if value is not None:
            raise Unsupported(f"{address} is a node's log: {NO_FORMAT}")
        _only(scheme, (*_STORES, "wal"), "a log that this process creates", content_type=content_type)
        _only(scheme, (*_STORES, "wal"), "a log that this process creates", create=create or None, options=options)
        return RemoteLog(place.text, security=security, read_from=read_from, env=env)
    options, events = _divided(options)
    tiers: dict[str, Any] = {"options": options, "events_options": events, "env": env}
    if place is None or not place.is_wal or place.folder is None:
        found = open_log(
            address,
            create=create,
            retention=retention,
            limits=limits,
            value=value,
            content_type=content_type,
            options=options,
            env=env,
        )
        return tiered(found, **tiers)
    if read_only:
        _only(scheme, (), "the process that writes the log (without read_only=)", create=create or None)
        reader = WalReader(place.folder, env=env)
        reader.check_value(value)
        check_same(reader.content_type, content_type, place.text)
        return tiered(reader, **tiers)
    log = WalLog.open(place.folder, create=create, value=value, content_type=content_type, env=env)
    try:
        return tiered(log, close_hot=True, **tiers)
    except BaseException:
        log.close()
        raise


def log_place(address: Address) -> ParsedAddress:
    """What the address of a log says; ``InvalidInput`` for one that no log has."""
    place = ParsedAddress.of(address)
    if place.scheme not in _SCHEMES:
        refuse_credentials(place.text, "give them in the environment, or as options")
        near = difflib.get_close_matches(place.scheme, _SCHEMES, 1)
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise InvalidInput(
            f"There are no logs at {place.scheme}://: " + (f"did you mean {near[0]}://?" if near else f"use {known}.")
        )
    return place


def _divided(options: Mapping[str, str] | None) -> tuple[Mapping[str, str] | None, Mapping[str, str] | None]:
    """Settings of object stores, and those of the Kafka client with the events of a cold tier, each None without any.

    >>> _divided({"region": "eu", "kafka.sasl.username": "etl"})
    ({'region': 'eu'}, {'sasl.username': 'etl'})
    """
    kafka = {name.removeprefix(_KAFKA): value for name, value in (options or {}).items() if name.startswith(_KAFKA)}
    stores = {name: value for name, value in (options or {}).items() if not name.startswith(_KAFKA)}
    return stores or None, kafka or None


def _only(scheme: str, schemes: tuple[str, ...], what: str, **given: Any) -> None:
    """Refuse arguments that mean nothing for this kind of log."""
    wrong = [name for name, value in given.items() if value is not None]
    if wrong and scheme not in schemes:
        raise InvalidInput(f"{', '.join(f'{name}=' for name in wrong)} is for {what}, not for {scheme}://.")


# Its public name, in help(), in pickles and in the errors of Python. Here it must not hide the builtin.
for _call in (open_url, inspect.unwrap(open_url)):
    _call.__module__, _call.__name__, _call.__qualname__ = "strandline", "open", "open"
