"""``strandline node reset-term``: let a node forget a term in which nobody leads."""

from __future__ import annotations

from typing import Annotated

import typer

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, confirm, guarded
from strandline.cli.node.shared import Yes
from strandline.cli.targets import look, need
from strandline.errors import InvalidInput
from strandline.formats.node.state import decode_node
from strandline.log.folders import FolderKind
from strandline.log.wal.log import WalLog
from strandline.node.elect.terms import plausible_term
from strandline.node.node_folder import STATE, NodeFolder
from strandline.storage.disk import DISK


@guarded
def reset_term(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The folder of a node that does not run.", show_default=False)
    ],
    *,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="TERM",
            min=0,
            help="The highest term that counts; by default the one of its records and of its own leading.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Let the stopped node in FOLDER forget terms that are higher than those of its records.

    For a node that refuses its primary, or to lead, because somebody told it of a term in which no node leads. Do it
    only if that is so: a primary of that term would not be told from an older one any more.
    """
    need(look(folder), FolderKind.NODE)
    state = decode_node(DISK.read(f"{folder}/{STATE}"), f"{folder}/{STATE}")
    with NodeFolder.open(folder, state.name) as node_folder:
        before = node_folder.state
        in_log = _highest_term(node_folder) if before.generation else 0
        term = plausible_term(in_log, before.adopted, before.led) if to is None else to
        if term < in_log:
            raise InvalidInput(f"{folder} has records of term {in_log}: a lower one than that cannot count.")
        if term < before.seen:
            confirm(
                f"Let {before.name} forget terms {term + 1} to {before.seen}? Only if no node leads in one of them.",
                yes=yes,
            )
            node_folder.reset_term(term)
    changed = term < before.seen
    if json:
        show.document({"name": before.name, "before": before.seen, "term": min(term, before.seen), "changed": changed})
    elif changed:
        show.line(f"{before.name} has seen term {term} now, and {before.seen} no more. Start it again.")
    else:
        show.line(f"{before.name} has seen no term above {before.seen}. Nothing was changed.")


def _highest_term(node_folder: NodeFolder) -> int:
    """The term of the last record; terms never go down along a log."""
    log = WalLog.open(node_folder.data(node_folder.state.generation), create=False, background=False)
    try:
        return log.end().term
    finally:
        log.close()
