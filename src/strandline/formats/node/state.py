"""What a node remembers of itself, as JSON with a checksum: ``node.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from strandline.errors import CorruptData
from strandline.formats.json.checked import decode_checked, encode_checked
from strandline.model.json_values import natural, text
from strandline.model.node import NodeState, Peer, Trouble

KIND: Final = "strandline-node"
VERSION: Final = 1
_NUMBERS: Final = ("generation", "seen", "adopted", "led", "committed")


def encode_node(state: NodeState) -> bytes:
    """The bytes of a state."""
    return encode_checked(KIND, VERSION, asdict(state))


def decode_node(data: bytes, where: str) -> NodeState:
    """The state in these bytes; damage is ``CorruptData``, never a node that has seen nothing."""
    try:
        fields = decode_checked(data, KIND, VERSION)
        plain: dict[str, Any] = {name: natural(fields.pop(name)) for name in _NUMBERS}
        peers = tuple(map(_peer, fields.pop("peers")))
        found = fields.pop("trouble")
        trouble = None if found is None else Trouble(text(found["state"]), text(found["reason"]), natural(found["at"]))
        plain |= {name: text(fields[name]) for name in ("name", "primary", "policy")}
        # Earlier versions did not tell these.
        plain["settled"] = _flag(fields.get("settled", False))
        plain["divergences"] = natural(fields.get("divergences", 0))
        plain["led_since"] = natural(fields.get("led_since", 0))
        return NodeState(**plain, peers=peers, trouble=trouble)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptData(
            f"{where} is damaged: {error}. It says which terms this node must refuse, so that nothing is done without "
            "it: restore the file, or remove the node's folder and let it bootstrap again."
        ) from error


def _peer(fields: dict[str, Any]) -> Peer:
    return Peer(text(fields["name"]), _text(fields["region"]), natural(fields.get("divergences", 0)))


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{str(value)[:80]} is neither true nor false")
    return value


def _text(value: object) -> str | None:
    return None if value is None else text(value)
