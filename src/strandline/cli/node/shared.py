"""What the commands that ask a node share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from strandline.errors import NotReady, TransientStorageError
from strandline.node.flight.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity

NodeUrl = Annotated[
    str,
    typer.Argument(metavar="URL", help="The node: grpc://host:port or grpc+tls://host:port.", show_default=False),
]
TokenFile = Annotated[
    str | None,
    typer.Option("--token", metavar="FILE", help="The file with the token to show.", show_default=False),
]
Ca = Annotated[
    str | None,
    typer.Option("--ca", metavar="FILE", help="Who must have signed a node's certificate (PEM).", show_default=False),
]
Cert = Annotated[
    str | None,
    typer.Option("--cert", metavar="FILE", help="The certificate to show (PEM).", show_default=False),
]
Key = Annotated[str | None, typer.Option("--key", metavar="FILE", help="Its key (PEM).", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@contextmanager
def connect(url: str, *, token: str | None, ca: str | None, cert: str | None, key: str | None) -> Iterator[RemoteLog]:
    """The node at an address, called with these; where nobody listens, that is said in our own words."""
    security = ClientSecurity.load(roots=ca, certificate=cert, key=key, token=token)
    with RemoteLog(url, security=security) as node:
        try:
            yield node
        except TransientStorageError as error:
            if "failed to connect" in str(error):
                raise NotReady(f"Nobody answers at {url}: is the node running, and is the address right?") from error
            raise
