"""Permissions of created files and folders: owner only, by default."""

from __future__ import annotations

import os
from typing import Final

from strandline.errors import InvalidInput

SETTING: Final = "STRANDLINE_UMASK"
"""The environment variable by which folders and files are shared: rights to take away from 777 and 666, in octal."""

_PRIVATE: Final = 0o077
_ALL: Final = 0o777


def parse_umask(text: str) -> int:
    """The rights that a text in octal takes away; never those of the owner.

    >>> oct(parse_umask("027"))
    '0o27'
    """
    try:
        umask = int(text, 8)
    except ValueError:
        umask = -1
    if not 0 <= umask <= _ALL or umask & 0o700:
        raise InvalidInput(
            f"{SETTING}={text!r} is no umask: write three octal digits that leave the owner all rights, such as 077 "
            "(private, the default), 027 (the group may read) or 007 (the group may write, too)."
        )
    return umask


def _umask() -> int:
    text = os.environ.get(SETTING)
    return _PRIVATE if text is None else parse_umask(text)


def file_mode() -> int:
    """The mode of a new file; the process's own umask takes away more."""
    return 0o666 & ~_umask()


def folder_mode() -> int:
    """The mode of a new folder; the process's own umask takes away more."""
    return _ALL & ~_umask()
