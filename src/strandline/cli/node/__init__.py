"""``strandline node`` and ``strandline promote``: run, query and administer the nodes of a log."""

from __future__ import annotations

from strandline.cli.node.admin import rebootstrap, reset_term, rotate_keys, status, topology, unregister
from strandline.cli.node.members import add, policy, remove
from strandline.cli.node.run import run
from strandline.cli.shared.groups import group

node = group("Run a node of a replicated log, and administer running ones.")
for command in (run, topology, status, add, remove, policy, unregister, rotate_keys, rebootstrap, reset_term):
    node.command()(command)
