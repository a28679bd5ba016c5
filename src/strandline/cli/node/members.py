"""``strandline node add | remove | policy``: changes the nodes of a log, and its commit policy, while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

from strandline.cli.node.admin import Node, asking, node_at
from strandline.cli.node.node_state import member_lines
from strandline.cli.shared import output as show
from strandline.cli.shared.common import Yes, confirm, on_interruption
from strandline.cli.shared.options import argument, flag, option
from strandline.errors import InvalidInput
from strandline.model.addresses import check_replica_name
from strandline.model.node import Membership
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.members.rules import RemoveNode, SetPolicy
from strandline.node.members.steps import CHANGE_SECONDS, MemberChange
from strandline.storage.env import SYSTEM


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """The options of commands that change the nodes of a log, or its policy."""

    timeout: Annotated[float, option("SECONDS", "How long to wait for the change.", min=0)] = CHANGE_SECONDS
    force: Annotated[
        bool,
        flag(
            "Ask the present nodes for nothing: for when a majority is lost for good. What only they have is lost.",
            "--force",
        ),
    ] = False
    yes: Yes = False

    @contextmanager
    def of(self, node: RemoteLog) -> Iterator[MemberChange]:
        """A change of the log that a node leads, within the block; forcing it is confirmed first."""
        if self.force:
            question = "Ask the present nodes for nothing? Records that only those have that are lost are lost."
            confirm(question, yes=self.yes)
        with on_interruption(
            "a change that has begun goes on by itself, as 'strandline node topology' shows. Repeat the command to "
            "wait for it, or take it back: 'strandline node policy URL --cancel'."
        ):
            yield MemberChange(node, SYSTEM, timeout=self.timeout, force=self.force, progress=_progress())


def _progress() -> Callable[[str], None]:
    said: list[str] = []

    def say(text: str) -> None:
        if not show.for_programs() and said[-1:] != [text]:
            said.append(text)
            show.line(f"{text} …", file=sys.stderr)

    return say


def _answer(known: Membership, message: str) -> None:
    show.answer(asdict(known), message, *member_lines(known))


@asking
def add(
    node: Node,
    new: Annotated[str, argument("NAME=NODE_URL", "The new node, and where the others reach it.")],
    *,
    vote: Annotated[
        bool, flag("With a quorum: whether it becomes a voter, once it has caught up.", "--vote/--no-vote")
    ] = True,
    change: ChangeOptions,
) -> None:
    """Add a node to the log of the primary at URL; or change the address of one.

    It may follow from then on: start it with 'strandline node run', and it builds its copy. With a quorum it becomes a
    voter once it has caught up, and this waits for that. Repeating the command continues.

    Example: strandline node add grpc://10.0.0.1:7450 d=grpc://10.0.0.4:7450
    """
    name, url = node_at(new)
    check_replica_name(name)
    with change.of(node) as begun:
        known = begun.add(name, url, vote=vote)
    _answer(known, f"{name} is a node of the log.")


@asking
def remove(
    node: Node,
    name: Annotated[str, argument("NAME", "The node to remove.")],
    *,
    change: ChangeOptions,
) -> None:
    """Remove a node from the log of the primary at URL: it has no vote, and may not follow any more.

    Its slot is dropped, and the key for tickets rotated. The node that leads cannot be removed: promote another first.

    Example: strandline node remove grpc://10.0.0.1:7450 c
    """
    check_replica_name(name)
    confirm(f"Remove node {name!r} from the log? It follows no more, and has no vote.", yes=change.yes)
    with change.of(node) as begun:
        known = begun.complete(RemoveNode(name))
    _answer(known, f"{name} is no node of the log any more.")


@asking
def policy(
    node: Node,
    policy: Annotated[  # noqa: A002, RUF100 - the name of the argument
        str | None, argument("[POLICY]", "local, ack_n(2), quorum(a,b,c) or regions(eu=1,us=1).")
    ] = None,
    *,
    cancel: Annotated[bool, flag("Take back the change that is pending.", "--cancel")] = False,
    change: ChangeOptions,
) -> None:
    """Show the commit policy and the nodes of the log of the primary at URL, or change the policy.

    Until a change is complete, appends wait for the former policy and for the new one.

    Example: strandline node policy grpc://10.0.0.1:7450 'ack_n(1)'
    """
    if cancel and policy is not None:
        raise InvalidInput("--cancel goes back to the policy before the pending change: leave out POLICY.")
    if policy is None and not cancel:
        seen = node.topology()
        recorded = {} if seen.membership is None else asdict(seen.membership)
        show.answer({"policy": seen.policy, "membership": recorded or None}, seen.policy,
                    *([] if seen.membership is None else member_lines(seen.membership)))  # fmt: skip
        return
    with change.of(node) as begun:
        known = begun.cancel() if policy is None else begun.complete(SetPolicy(policy))
    _answer(known, f"The log commits under {known.members.policy}.")
