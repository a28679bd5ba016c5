"""Opens the object store at an address."""

from __future__ import annotations

from collections.abc import Mapping

from obstore.store import MemoryStore

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, ParsedAddress, refuse_credentials
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.settings import store_settings
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import RetryingStore

_CLOUDS = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure", "adl")

_memory: dict[str, ObstoreStore] = {}


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
