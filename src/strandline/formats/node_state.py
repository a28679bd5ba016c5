"""What a node remembers of itself, as JSON with a checksum: ``node.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from strandline.formats.checksum import crc32c
from strandline.model.errors import CorruptData, UnsupportedVersion
from strandline.model.node import NodeState, Peer, Trouble

KIND: Final = "strandline-node"
VERSION: Final = 1
_NUMBERS: Final = ("generation", "seen", "adopted", "led", "committed")


def encode_node(state: NodeState) -> bytes:
    """The bytes of a state."""
    fields: dict[str, Any] = {"kind": KIND, "version": VERSION, **asdict(state)}
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1, sort_keys=True).encode() + b"\n"


def decode_node(data: bytes, where: str) -> NodeState:
    """The state in these bytes; damage is ``CorruptData``, never a node that has seen nothing."""
    try:
        fields = json.loads(data)
        checksum = fields.pop("checksum")
        if checksum != _checksum(fields) or fields.pop("kind") != KIND:
            raise ValueError("its checksum is wrong, or it is something else")  # noqa: TRY301 - one sentence for all
        version = fields.pop("version")
        if version != VERSION:
            raise UnsupportedVersion(
                f"{where} is of version {version}, and this program reads version {VERSION}: upgrade strandline."
            )
        plain: dict[str, Any] = {name: _natural(fields.pop(name)) for name in _NUMBERS}
        peers = tuple(Peer(str(peer["name"]), _text(peer["region"])) for peer in fields.pop("peers"))
        found = fields.pop("trouble")
        trouble = None if found is None else Trouble(str(found["state"]), str(found["reason"]), _natural(found["at"]))
        plain |= {name: str(fields[name]) for name in ("name", "primary", "policy")}
        return NodeState(**plain, peers=peers, trouble=trouble)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"{where} is damaged: {error}. It says which terms this node must refuse, so that nothing is done without "
            "it: restore the file, or remove the node's folder and let it bootstrap again."
        ) from error


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:80]} is no whole number")
    return value


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _checksum(fields: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(fields, sort_keys=True).encode()):08x}"
