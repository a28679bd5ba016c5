"""Plain names: what replicas, nodes, slots and snapshots may be called, wherever the name comes from."""

from __future__ import annotations

import re
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.slots import TIER_SLOT

BOOTSTRAP_SUFFIX: Final = ".bootstrap"
"""The slot that pins the log while a replica bootstraps has the replica's name and this."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def is_plain_name(name: str) -> bool:
    r"""Whether a text is one file name on every system, and nothing else: no path, no ``..``, no hidden file.

    >>> [is_plain_name(name) for name in ("replica-1", "a.b", "..", "a/b", "", ".a", "a\n")]
    [True, True, False, False, False, False, False]
    """
    return _PLAIN.fullmatch(name) is not None


def check_plain_name(name: str, what: str) -> str:
    """The name, if it is a plain one; ``InvalidInput`` otherwise. ``what`` says what it would name."""
    if not is_plain_name(name):
        raise InvalidInput(
            f"{name[:200]!r} cannot name a {what}: use up to 128 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit."
        )
    return name


def check_replica_name(name: str) -> str:
    """The name, if a replica may be called so: a plain name, and not one that the log's own slots have."""
    check_plain_name(name, "replica")
    if name == TIER_SLOT or name.endswith(BOOTSTRAP_SUFFIX):
        raise InvalidInput(f"{name!r} cannot name a replica: the log's own slots are called so. Take another name.")
    return name
