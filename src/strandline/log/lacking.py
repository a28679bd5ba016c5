"""Calls that only some kinds of logs support. On the others they are ``Unsupported``, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from strandline.errors import UnsupportedCall
from strandline.model.arguments import with_article

if TYPE_CHECKING:
    from typing import NoReturn

_NO_VALUE: Final = (
    "it records no value format. A queue of version 1 has no place for it, and replicas of a node would not know its "
    "changes after a failover. Give the codec to producers, sinks and readers."
)
_WRITERS: Final = "writers are known to whatever orders the log: ask the process that writes it, or the primary."
_TERMS: Final = "only a write-ahead log on this disk knows the terms of its records. Cursors carry them, too."
_A_NODE: Final = "only a node in this process has it. Ask others, by their addresses, for status() or topology()."
_A_PRIMARY: Final = "only a Primary keeps replicas: call it there."
_NODES: Final = "only a replicated log, opened by the addresses of its nodes, has them."
_MEMBERS: Final = "only a replicated log has nodes: call it on the Primary, or open the address of its nodes."
_A_REPLICA: Final = "only replicas can do that: open the replica, or its address (grpc://host:port)."

OPTIONAL_CALLS: Final[Mapping[str, str]] = {
    "value": _NO_VALUE,
    "value_versions": _NO_VALUE,
    "evolve_value": _NO_VALUE,
    "trim": "only what writes a log trims it: the process of a write-ahead log, or the Primary, also by its retention.",
    "hold": "only object logs have holds. Create a slot, which pins the log, too.",
    "set_retention": "only object logs store it. A write-ahead log gets it with trim(), a node by retention=.",
    "slot_limits": "only object logs store them. A write-ahead log gets them with trim(), a node by its settings.",
    "enforce": "limits of slots are enforced when the log is trimmed.",
    "verify": "sl.bulk.verify and the command verify check every kind of log.",
    "append_at": "a queue of version 1 numbers batches, not records.",
    "last_append": _WRITERS,
    "last_number": _WRITERS,
    "append_batch": "only a write-ahead log has it: use append().",
    "append_value": "only a write-ahead log has it: use append(), or a producer().",
    "append_values": "only a Primary has it: use append(), or a producer().",
    "submit": "only a Primary has it: use append(), or a producer().",
    "bytes_behind": "only a write-ahead log counts them: the command lag shows how far its slots are behind.",
    "term_at": _TERMS,
    "end_of_term": _TERMS,
    "reading": "only a node in this process has a second log for readers: read this one.",
    "committed": _A_NODE,
    "condition": _A_NODE,
    "trouble": _A_NODE,
    "position": _A_NODE,
    "commit_watermark": _A_PRIMARY,
    "plan_resume": _A_PRIMARY,
    "register_replica": _A_PRIMARY,
    "unregister_replica": _A_PRIMARY,
    "unregister": _NODES,
    "rotate_keys": _NODES,
    "add_node": _MEMBERS,
    "remove_node": _MEMBERS,
    "set_policy": _MEMBERS,
    "change_members": _MEMBERS,
    "slot_lags": _NODES,
    "topology": _NODES,
    "status": _NODES,
    "promote": _A_REPLICA,
    "rebootstrap": _A_REPLICA,
}
"""The public calls of all kinds of logs that the contract leaves out, and why a log may lack them."""


def refusal(log: object, call: str) -> UnsupportedCall:
    """The error for a call that this log does not support."""
    owner = with_article(type(log).__name__)
    return UnsupportedCall(f"{owner[0].upper()}{owner[1:]} has no {call}: {OPTIONAL_CALLS[call]}")


class OptionalCalls:
    """Base class of logs: each of the :data:`OPTIONAL_CALLS` that a subclass lacks is an ``UnsupportedCall``."""

    _answers_every_name = False

    if not TYPE_CHECKING:  # a type checker refuses what a kind of log does not define

        def __getattr__(self, name: str) -> NoReturn:
            if name in OPTIONAL_CALLS and not hasattr(type(self), name):
                raise refusal(self, name)
            # An unknown name; or a property that itself raised an AttributeError, which is raised again.
            object.__getattribute__(self, name)
