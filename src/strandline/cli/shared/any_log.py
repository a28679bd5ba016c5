"""Logs of every kind for commands: opened by their address, with the options that connect to a node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeAlias
from urllib.parse import quote

import typer

import strandline as sl
from strandline.cli.shared.common import both_tiers, guarded, object_log_at, wal_folder
from strandline.cli.shared.targets import contents_at, folder_at
from strandline.errors import InvalidInput, NotALog, NotReady, TransientStorageError, WrongKind
from strandline.log.folders import FolderKind
from strandline.log.wal.log import WalLog
from strandline.model.addresses import is_node_address
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity
from strandline.opening import scheme_of
from strandline.tier.opening import tiered
from strandline.values.contract import Codec

P = ParamSpec("P")

AnyLog: TypeAlias = sl.log.ObjectLog | sl.tier.TieredLog | WalLog | sl.log.WalReader | RemoteLog

LogUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The log: a folder, file://, s3://, gs://, az://, wal:///folder, or a node at grpc://host:port.",
    ),
]
_NODE_PANEL: Final = "To connect to a node"
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The file with the token to authenticate with.", rich_help_panel=_NODE_PANEL),
]
Ca = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="The authority that signs the nodes' certificates (PEM).", rich_help_panel=_NODE_PANEL
    ),
]
Cert = Annotated[
    str | None, typer.Option(metavar="FILE", help="The certificate to show (PEM).", rich_help_panel=_NODE_PANEL)
]
_ITS_KEY: Final = "The key of that certificate (PEM)."
Key = Annotated[
    str | None, typer.Option("--cert-key", "--key", metavar="FILE", help=_ITS_KEY, rich_help_panel=_NODE_PANEL)
]
_CertKey = Annotated[str | None, typer.Option("--cert-key", metavar="FILE", help=_ITS_KEY, rich_help_panel=_NODE_PANEL)]


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A log that a command was given, by its address."""

    url: str
    security: ClientSecurity | None
    """How to connect to a node; None for another log."""

    @property
    def folder(self) -> str | None:
        """The folder of a write-ahead log, by its path or address; None for another log."""
        if self.url.startswith("wal://"):
            return wal_folder(self.url)
        local = folder_at(self.url)
        is_wal = local is not None and FolderKind.WAL in contents_at(str(local)).kinds
        return wal_folder(self.url) if is_wal else None

    @property
    def is_node(self) -> bool:
        """Whether it is the log of a node."""
        return self.security is not None

    @contextmanager
    def reading(self) -> Iterator[AnyLog]:
        """Open the log for reading, and for its slots, without a lock: other processes may be writing it."""
        if self.security is not None:
            with connection_errors(self.url), RemoteLog(self.url, security=self.security) as node:
                yield node
        elif (folder := self.folder) is not None:
            with tiered(sl.log.WalReader(folder), close_hot=True) as log:
                yield log
        else:
            with both_tiers(object_log_at(self.url)) as log:
                yield log

    @contextmanager
    def writing(
        self,
        *,
        create: bool = False,
        retention: str | None = None,
        value: Codec | None = None,
        hint: str = "check the address",
    ) -> Iterator[AnyLog]:
        """Open the log for changes: of a write-ahead log this is the only process that writes it."""
        folder = None if self.is_node else self.folder
        if self.is_node:
            _only_for_object_logs(self.url, retention)
            if create:
                raise InvalidInput(f"--create is not for {self.url}: a node makes its own log ('strandline node run').")
            with self.reading() as node:
                node.bounds()  # a wrong address is found now, not after all the retries of a producer
                yield node
        elif folder is not None:
            _only_for_object_logs(self.url, retention)
            with _open_wal(self.url, folder, create=create, value=value, hint=hint) as log:
                yield log
        else:
            with both_tiers(object_log_at(self.url, create=create, retention=retention, value=value, hint=hint)) as log:
                yield log


def _open_wal(url: str, folder: str, *, create: bool, value: Codec | None, hint: str) -> AnyLog:
    try:
        return sl.open(wal_url(folder), create=create, value=value)
    except WrongKind:
        raise
    except NotALog as error:
        raise NotALog(f"There is no log at {url}: {hint}.") from error


def _only_for_object_logs(url: str, retention: str | None) -> None:
    if retention is not None:
        raise InvalidInput(f"--retention is for an object log: {url} is trimmed by the process that writes it.")


def wal_url(folder: str) -> str:
    """The address of a write-ahead log in a folder."""
    return f"wal://{quote(str(Path(folder).absolute()))}"


@contextmanager
def connection_errors(url: str) -> Iterator[None]:
    """Raise ``NotReady`` with one sentence if a connection is refused."""
    try:
        yield
    except TransientStorageError as error:
        if "failed to connect" in str(error):
            raise NotReady(f"No node answers at {url}: check that it runs, and the address.") from error
        raise


def log_place(
    url: LogUrl, *, token: TokenFile = None, ca: Ca = None, cert: Cert = None, cert_key: Key = None
) -> LogPlace:
    """The log at an address, with the options for a node checked; ``InvalidInput`` if it is not a node's."""
    scheme_of(url)
    if is_node_address(url):
        return LogPlace(url, ClientSecurity.load(roots=ca, certificate=cert, key=cert_key, token=token))
    given = {"--token": token, "--ca": ca, "--cert": cert, "--cert-key": cert_key}
    if wrong := [option for option, value in given.items() if value is not None]:
        raise InvalidInput(f"{', '.join(wrong)} is for a node (grpc://host:port), not for {url}.")
    return LogPlace(url, None)


def on_any_log(command: Callable[Concatenate[LogPlace, P], None]) -> Callable[..., None]:
    """Make a command for the log at its argument URL; adds the options of :func:`log_place` to its own.

    ``--key`` is that of the certificate, unless the command has an option of that name.
    """
    connecting = list(inspect.signature(log_place, eval_str=True).parameters.values())
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    if any(each.name == "key" for each in own):
        connecting = [each.replace(annotation=_CertKey) if each.name == "cert_key" else each for each in connecting]

    @wraps(command)
    def run(url: str, *arguments: P.args, **options: P.kwargs) -> None:
        given: dict[str, Any] = {each.name: options.pop(each.name) for each in connecting[1:]}
        command(log_place(url, **given), *arguments, **options)

    parameters = sorted([connecting[0], *own, *connecting[1:]], key=lambda each: each.kind)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return guarded(run)
