"""Opens the log of a driver call, with its cold tier, for the duration of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from typing import TypeAlias

from strandline.errors import InvalidInput
from strandline.log.object import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.addresses import Address, ParsedAddress, as_address
from strandline.node.api import Primary, Replica
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity
from strandline.opening import AddressedLog, open_url
from strandline.spark.options import NodeAccess, ReadOptions, parse_options
from strandline.spark.storage_options import storage_options, with_redacted_names
from strandline.tier.opening import tiered
from strandline.tier.read.tiered_log import TieredLog

SharedLog: TypeAlias = AddressedLog | Primary | Replica
"""A log that Spark's processes can open, too, by its address."""


@contextlib.contextmanager
def opened(log: SharedLog | Address, options: Mapping[str, str]) -> Iterator[SharedLog]:
    """The log with its cold tier, if it has one, within the block; ``options`` are the data source's, in lower case.

    Closes what it opens; a given log stays open. A write-ahead log by its address is opened for reading.
    ``InvalidInput`` for a log that only this process can read.
    """
    if isinstance(log, TieredLog | RemoteLog | Primary | Replica):
        yield log
        return
    found: SharedLog
    if isinstance(log, str | PathLike):
        found = opened_log(parse_options({**options, "path": as_address(log)}))
    elif isinstance(log, ObjectLog | WalLog | WalReader):
        # Spark's processes read both tiers of the log at this address, and this process must see the same.
        found = tiered(log, options=storage_options(options) or None)
    else:
        raise InvalidInput(
            f"Spark reads only logs that other processes can open, and {log!r} is not one: use a log in a folder, in a "
            "bucket or on a node. Copy a queue of version 1 into a log first (strandline upgrade)."
        )
    try:
        yield found
    finally:
        if isinstance(found, TieredLog):
            found.close()  # it is opened again when it is needed; a node's connection stays for the query's slot


def opened_log(options: ReadOptions) -> AddressedLog:
    """The log of a read, for planning; a write-ahead log is opened for reading."""
    place, storage = ParsedAddress.of(options.url), options.storage or None
    if options.queue is not None:
        return open_url(options.url, format=options.queue, options=storage)
    if place.is_node:
        return open_url(options.url, security=security_of(options.node), read_from=options.node.read_from)
    return open_url(options.url, options=storage, read_only=place.is_wal)


def security_of(access: NodeAccess) -> ClientSecurity | None:
    """How the driver authenticates itself to nodes; None without any."""
    found = ClientSecurity.load(
        roots=access.ca_file, certificate=access.cert_file, key=access.key_file, token=access.token_file
    )
    if access.token is not None:
        found = replace(found, token=access.token)
    if access.ca is not None:
        found = replace(found, roots=access.ca.encode())
    return None if found == ClientSecurity() else found


def access_options(log: SharedLog | Address, given: Mapping[str, str]) -> dict[str, str]:
    """The options, with how Spark's process calls the nodes of this log; secrets have names that Spark redacts."""
    given = with_redacted_names(given)
    security = log.security if isinstance(log, RemoteLog) else None
    if security is None or any(name in given for name in ("token", "tokenfile", "certfile")):
        return given
    if security.certificate is not None:
        raise InvalidInput(
            "A private key is not passed to Spark's processes: name the certificate and its key as files there, with "
            "the options certFile and keyFile."
        )
    own = {"token": security.token, "ca": None if security.roots is None else security.roots.decode()}
    return {**{name: text for name, text in own.items() if text is not None}, **given}
