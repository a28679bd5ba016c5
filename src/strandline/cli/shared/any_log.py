"""Logs of every kind for commands: opened by path or address, with errors that name commands and options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

import strandline as sl
from strandline.cli.shared.options import argument, for_nodes, shared
from strandline.cli.shared.targets import contents_at, is_free
from strandline.compat.v1.log import QueueFormat, QueueLog, open_format
from strandline.errors import InvalidInput, NotALog, NotFound, NotReady, TransientStorageError, Unsupported, WrongKind
from strandline.log.folders import Contents, FolderKind, refuse_others
from strandline.model.addresses import ParsedAddress, refuse_credentials
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity
from strandline.opening import OpenedLog, log_place
from strandline.tier.read.tiered_log import hot_log, hot_tier
from strandline.tier.verify import HotLog
from strandline.values.contract import Codec

AnyLog: TypeAlias = OpenedLog


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A log that a command was given. A path that holds a write-ahead log names that."""

    url: str
    other: str | None = None
    """The other address that the command was given: options for nodes may be for that one."""

    @property
    def is_node(self) -> bool:
        """Whether it is the log of a node."""
        return ParsedAddress.of(self.url).is_node

    @property
    def contents(self) -> Contents | None:
        """What is at an address of this machine; None for any other."""
        folder = log_place(self.url).folder
        return None if folder is None else contents_at(str(Path(folder).absolute()))

    @property
    def folder(self) -> str | None:
        """The folder of a write-ahead log, from the root; None for another log."""
        there = self.contents
        if there is None or not (log_place(self.url).is_wal or FolderKind.WAL in there.kinds):
            return None
        if not is_free(there):
            refuse_others(there, FolderKind.WAL)
        return there.path

    def open(
        self,
        *,
        writes: bool = False,
        create: bool = False,
        retention: str | None = None,
        value: Codec | None = None,
        content_type: str | None = None,
    ) -> AnyLog:
        """Open the log with its cold tier: for reading, and for its slots if other processes may change those.

        With ``writes`` it is opened for changes: of a write-ahead log this is the only process that writes it.
        """
        refuse_access(*filter(None, (self.url, self.other)))
        there, folder = self.contents, self.folder
        if retention is not None and (self.is_node or folder is not None):
            raise InvalidInput(
                f"--retention is for an object log: {self.url} is trimmed by the process that writes it."
            )
        if self.is_node:
            if create:
                raise InvalidInput(f"--create is not for {self.url}: a node makes its own log ('strandline node run').")
            return sl.open(self.url, security=client_security())
        if there is not None and FolderKind.OBJECT_LOG in there.kinds:  # a queue beside it has its own folder
            found = dict(there.found)
            found.pop(FolderKind.QUEUE_V1, None)
            refuse_others(Contents(there.path, found), FolderKind.OBJECT_LOG)
        wal: dict[str, Any] = {"create": create} if writes else {"read_only": True}
        try:
            if folder is not None:
                return sl.open(f"wal://{quote(folder)}", value=value, content_type=content_type, **wal)
            return sl.open(self.url, create=create, retention=retention, value=value, content_type=content_type)
        except NotALog as error:
            if isinstance(error, WrongKind) or "create one" not in str(error):
                raise
            why = "" if there is None else f" (it is {there})"
            if there is not None and FolderKind.ABSENT in there.kinds:
                why = " (there is no such folder)"
            raise NotALog(
                f"There is no log at {self.url}{why}: check the address, or make one with 'strandline create'."
            ) from error

    @contextmanager
    def reading(self) -> Iterator[AnyLog]:
        """The log within the block, opened for reading."""
        with connection_errors(self.url), self.open() as log:
            yield log

    @contextmanager
    def writing(self, **options: Any) -> Iterator[AnyLog]:
        """The log within the block, opened for changes; the options are those of :meth:`open`."""
        with connection_errors(self.url), self.open(writes=True, **options) as log:
            if isinstance(log, RemoteLog):
                log.bounds()  # a wrong address is found now, not after all the retries of a producer
            yield log


AnyLogAt = Annotated[
    LogPlace,
    argument(
        "URL",
        "The log: a folder, file://, s3://, gs://, az://, wal:///folder, or a node at grpc://host:port.",
        parser=LogPlace,
    ),
]


def object_log_at(url: str, **options: Any) -> sl.log.ObjectLog:
    """The object log at an address, without its cold tier; ``options`` are those of :meth:`LogPlace.open`."""
    place = LogPlace(url)
    if place.is_node:
        raise _other_kind(url, "an object log", "the log of a node, which trims it ('strandline node run --retention')")
    if place.folder is not None:
        raise _other_kind(url, "an object log", "a write-ahead log, which the process that writes it trims")
    log = hot_tier(place.open(**options))
    assert isinstance(log, sl.log.ObjectLog)  # noqa: S101 - the address of one
    return log


def tierable_log(url: str, *, writes: bool = False) -> HotLog:
    """The log of a command for cold tiers, without that tier: for changes, or beside the process that writes it."""
    log = None if LogPlace(url).is_node else LogPlace(url).open(writes=writes)
    if log is None or isinstance(log, RemoteLog):
        raise _other_kind(url, "the log itself", "a node, which tiers its log by itself")
    return hot_log(log)


def _other_kind(url: str, wanted: str, found: str) -> Unsupported:
    refuse_credentials(url, "authenticate by --token, or by a certificate")
    return Unsupported(f"This command takes {wanted}, and {url} is {found}.")


def open_shared(url: str, form: QueueFormat) -> QueueLog:
    """The queue of version 1 at an address; one without a manifest is refused: the path may be mistyped."""
    folder = ParsedAddress.of(url).folder
    try:
        queue = open_format(url, form)
        queue.store.get(form.manifest)
    except (WrongKind, NotFound) as error:
        if folder is not None and not is_free(there := contents_at(str(Path(folder).absolute()))):
            refuse_others(there, FolderKind.QUEUE_V1)
        if isinstance(error, WrongKind):
            raise
        raise NotALog(
            f"There is no queue manifest at {url.rstrip('/')}/{form.manifest}: check the address and --manifest, or "
            "nothing was ever listed there."
        ) from error
    return queue


@contextmanager
def connection_errors(url: str) -> Iterator[None]:
    """Raise ``NotReady`` with one sentence if a connection is refused."""
    try:
        yield
    except TransientStorageError as error:
        if "failed to connect" in str(error):
            raise NotReady(f"No node answers at {url}: check that it runs, and the address.") from error
        raise


def client_security() -> ClientSecurity:
    """How the running command authenticates itself to nodes."""
    given = shared()
    return ClientSecurity.load(roots=given.ca, certificate=given.cert, key=given.cert_key, token=given.token)


def refuse_access(*urls: str) -> None:
    """``InvalidInput`` for options that connect to a node, if none of the addresses is a node's."""
    if any(ParsedAddress.of(url).is_node for url in urls):
        return
    if wrong := for_nodes():
        raise InvalidInput(f"{', '.join(wrong)} is for a node (grpc://host:port), not for {' or '.join(urls)}.")
