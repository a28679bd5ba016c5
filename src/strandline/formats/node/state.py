"""The state file of a node, JSON with a checksum: ``node.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.model.json_values import read_record
from strandline.model.node import NodeState

KIND: Final = "strandline-node"
VERSION: Final = 1
_ADDED: Final = ("settled", "divergences", "led_since", "cold", "membership")
"""Fields that earlier versions did not write."""


def encode_node(state: NodeState) -> bytes:
    """The bytes of a state."""
    return encode_checked(KIND, VERSION, asdict(state))


def decode_node(data: bytes, where: str) -> NodeState:
    """Decode a state; damage is ``CorruptData``, never a node without history."""
    with damage(
        where,
        "It holds the terms that this node must refuse, and nothing is done without it: restore the file, or remove "
        "the node's folder and let it bootstrap again.",
    ):
        return read_record(NodeState, decode_checked(data, KIND, VERSION), optional=_ADDED)
