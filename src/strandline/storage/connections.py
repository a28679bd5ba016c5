"""Open TCP connections of this process at one of its own ports, for servers whose library does not show them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
"""Where the open files of this process are listed."""

_MAPPED: Final = "::ffff:"
"""Prefix of IPv4 addresses in IPv6 sockets."""


def peer_name(host: str, port: int | str) -> str:
    """Address and port of a caller as one text; IPv4 addresses that are mapped into IPv6 are unmapped.

    >>> peer_name("::ffff:10.0.0.1", 7), peer_name("::1", "7")
    ('10.0.0.1:7', '::1:7')
    """
    return f"{host.removeprefix(_MAPPED)}:{port}"


@contextlib.contextmanager
def connections_at(port: int) -> Iterator[dict[str, socket.socket]]:
    """The connections that this process has accepted at a port, by the name of each caller, during the block.

    Shutting one of them down ends it for its owner, too. None where the system does not list open files.
    """
    with contextlib.ExitStack() as held:
        found: dict[str, socket.socket] = {}
        for number in _open_files():
            with contextlib.suppress(OSError):  # closed meanwhile, or it only listens
                one = held.enter_context(_duplicate(number))
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                    host, its_port, *_ = one.getpeername()
                    found[peer_name(host, its_port)] = one
        yield found


def _open_files() -> list[int]:
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
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
