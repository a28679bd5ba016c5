"""Addresses that carry credentials, which are refused before anything is done with them, or said of them."""

from __future__ import annotations

from typing import Final

from strandline.model.errors import InvalidInput

_CONTAINERS: Final = frozenset({"abfs", "abfss", "az", "azure", "adl", "wasb", "wasbs"})
"""Here a name before the @ is that of a container."""


def refuse_credentials(url: str, remedy: str) -> None:
    """``InvalidInput`` for an address with a user, a key or a password in it, none of which is repeated.

    Addresses get into logs, metrics, error messages and the history of shells. ``remedy`` says where the credentials
    belong instead.

    >>> refuse_credentials("s3://bucket/logs", "")
    >>> refuse_credentials("abfss://container@account.dfs.core.windows.net/logs", "")
    """
    if "://" not in url:
        return
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0].partition("?")[0].partition("#")[0]
    known, found, host = authority.rpartition("@")
    # A secret may hold a slash itself: then the @ stands behind what looks like a path.
    if not found and ":" in authority and not _port(authority) and "@" in rest:
        known, found, host = authority, "@", "…"
    if not found or (scheme in _CONTAINERS and ":" not in known):
        return
    raise InvalidInput(
        f"The address {scheme}://…@{host} has credentials in it, which would be seen wherever addresses are: take them "
        f"out, and {remedy}."
    )


def _port(authority: str) -> bool:
    return authority.rpartition(":")[2].isdecimal()
