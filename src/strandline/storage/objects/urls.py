"""Opens the object store at an address, with settings as they are given: by options, and out of files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from obstore.store import MemoryStore

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, ParsedAddress, refuse_credentials
from strandline.model.arguments import shown
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import RetryingStore

_CLOUDS = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure", "adl")

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

_TEXTS: Final = ("certificate", "service_account")
"""Parts of the names of settings whose values are whole files, with line breaks."""

_memory: dict[str, ObstoreStore] = {}


def store_settings(options: Mapping[str, str] | None) -> dict[str, str]:
    r"""The settings without the space around their values: a secret out of a mounted file often ends with a line break.

    ``InvalidInput`` for a control character within a value, which no request can hold.

    >>> store_settings({"account_key": "c2VjcmV0\n"})
    {'account_key': 'c2VjcmV0'}
    """
    found = {name: value.strip() for name, value in (options or {}).items()}
    for name, value in found.items():
        is_text = any(part in name.lower() for part in _TEXTS)
        if not is_text and _CONTROL.search(value):
            raise InvalidInput(
                f"The storage option {shown(name)} has a control character, such as a line break, within its value, "
                "which no request can hold: give the value alone."
            )
    return found


def store_at(address: Address | ObjectStore, options: Mapping[str, str] | None = None) -> ObjectStore:
    """The given store, or the one at an address; ``InvalidInput`` for anything else."""
    return address if isinstance(address, ObjectStore) else open_store(address, options)


def open_store(address: Address, options: Mapping[str, str] | None = None) -> ObjectStore:
    """The store at an address, with retries of transient failures. Sends no request yet.

    ``memory://name`` (shared within this process), ``file:///folder`` or a plain path, ``s3://``, ``gs://``,
    ``az://``. Credentials and endpoints come from the usual environment variables of each cloud; ``options`` are
    obstore's configuration names, and take precedence.
    """
    place = ParsedAddress.of(address)
    url, scheme = place.text, place.scheme
    refuse_credentials(url, "set the environment variables of the cloud (such as AWS_ACCESS_KEY_ID), or give options")
    settings = store_settings(options)
    for name, value in settings.items():
        if "proxy" not in name.lower():  # errors repeat the addresses of requests, and not that of a proxy
            refuse_credentials(value, f"give them as options of their own, beside {name}")
    if scheme == "file":
        if place.folder is None:
            raise InvalidInput(f"{url!r} names no folder; write file:///path/to/folder.")
        return RetryingStore(LocalStore(place.folder))
    if scheme == "memory":
        found = _memory.get(url)
        # Without a lock, which might be held when the process forks: the second creator uses the first one's.
        store = _memory.setdefault(url, ObstoreStore(url, client=MemoryStore())) if found is None else found
        return RetryingStore(store)
    if scheme in _CLOUDS:
        return RetryingStore(ObstoreStore(url, settings))
    raise InvalidInput(f"{url!r} has an unknown scheme; use file://, memory://, s3://, gs:// or az://.")
