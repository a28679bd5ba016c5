"""Open TCP connections of this process at one of its own ports, for servers whose library does not show them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Collection
from ipaddress import IPv6Network
from typing import Final

_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
"""Where the open files of this process are listed."""

_NO_NUMBER: Final = (errno.EMFILE, errno.ENFILE)

_MAPPED: Final = "::ffff:"
"""Prefix of IPv4 addresses in IPv6 sockets."""

_SUBSCRIBER_BITS: Final = 64
"""A subscriber of IPv6 has all addresses of a network of this size."""


def peer_name(host: str, port: int | str) -> str:
    """Address and port of a caller as one text; IPv4 addresses that are mapped into IPv6 are unmapped, without a zone.

    >>> peer_name("::ffff:10.0.0.1", 7), peer_name("::1", "7"), peer_name("fe80::1%eth0", 7)
    ('10.0.0.1:7', '::1:7', 'fe80::1:7')
    """
    return f"{_plain(host)}:{port}"


def network_of(peer: str) -> str:
    """The network of one caller: the address of a :func:`peer_name`, the first 64 bits of IPv6.

    >>> network_of("10.0.0.1:7"), network_of("2001:db8::1:7"), network_of("2001:db8::ffff:2:7")
    ('10.0.0.1', '2001:db8::', '2001:db8::')
    """
    host = peer.rpartition(":")[0]
    if ":" not in host:
        return host
    return str(IPv6Network((host, _SUBSCRIBER_BITS), strict=False).network_address)


def connections_at(port: int, hosts: Collection[str] = ()) -> dict[str, int]:
    """The connections that this process has accepted at a port, by the name of each caller, with their file numbers.

    ``hosts`` are the own addresses that count; without any, all. None where the system does not list open files, and
    ``OSError`` if that fails, or the process has no free file number: then nobody knows what is open.
    """
    found: dict[str, int] = {}
    for number in _open_files():
        try:
            with _duplicate(number) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    host, its_port, *_ = one.getsockname()
                    if its_port == port and (not hosts or _plain(host) in hosts):
                        found[peer_name(*one.getpeername()[:2])] = number
        except OSError as error:  # closed meanwhile, or it only listens
            if error.errno in _NO_NUMBER:
                raise
    return found


def end_connection(peer: str, number: int) -> None:
    """End a connection of :func:`connections_at`, for its owner, too; nothing if it is closed already."""
    with contextlib.suppress(OSError), _duplicate(number) as one:
        if peer_name(*one.getpeername()[:2]) == peer:  # and not another one that has the number now
            one.shutdown(socket.SHUT_RDWR)


def _plain(host: str) -> str:
    return host.removeprefix(_MAPPED).partition("%")[0]


def _open_files() -> list[int]:
    for folder in _FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            return [int(name) for name in os.listdir(folder)]
    return []


def _duplicate(number: int) -> socket.socket:
    """A second handle of a socket: the first may be closed, and its number used again, at any moment."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"{number} is no socket")
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise
