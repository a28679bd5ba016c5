"""Membership rules as pure functions: who belongs to a log, what a change makes of it, and when that is complete.

A change has two records. The first has the members before and after it: until it is complete, commits need both
policies, and a candidate has to hear of everything that either may have committed. It is complete when its record, and
everything from before it, is durable as both policies ask; then the second record drops the former members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Final, TypeAlias

import msgspec

from strandline.errors import Fenced, InvalidInput, NotFound, NotReady
from strandline.model.addresses import check_replica_name
from strandline.model.arguments import Natural
from strandline.model.json_values import PlainName
from strandline.model.node import LogMembers, Membership, NodeAddress
from strandline.node.lead.policies import (
    Among,
    CommitPolicy,
    DurableOffsets,
    Every,
    Quorum,
    among,
    parse_policy,
    watermark,
)

MOST_NODES: Final = 256
_LONGEST_URL: Final = 512
_LONGEST_POLICY: Final = 1 << 14
_HIGHEST_NUMBER: Final = 1 << 53


class _Change(msgspec.Struct, frozen=True, tag_field="change", forbid_unknown_fields=True):
    """A change as a request has it: its fields, and in ``change`` which one it is."""


class AddNode(_Change, frozen=True, tag="add"):
    """Add a node, which does not vote yet; or change the address of one."""

    name: PlainName
    url: Annotated[str, msgspec.Meta(max_length=4096)]


class RemoveNode(_Change, frozen=True, tag="remove"):
    """Remove a node, and its vote."""

    name: PlainName


class SetPolicy(_Change, frozen=True, tag="policy"):
    """Commit under another policy."""

    policy: Annotated[str, msgspec.Meta(max_length=_LONGEST_POLICY)]


class CancelChange(_Change, frozen=True, tag="cancel"):
    """Take back a pending change, by one in the other direction. Repeating it is harmless."""

    term: Natural
    number: Natural
    """Those of the record that is pending."""

    @property
    def version(self) -> tuple[int, int]:
        """Term and number."""
        return self.term, self.number


Change: TypeAlias = AddNode | RemoveNode | SetPolicy | CancelChange


def members_of(nodes: Mapping[str, str], policy: CommitPolicy | str) -> LogMembers:
    """LogMembers as a value, in one order."""
    return LogMembers(tuple(NodeAddress(name, url) for name, url in sorted(nodes.items())), str(policy))


def parts(known: Membership) -> tuple[LogMembers, ...]:
    """The members, and while a change is pending those before it."""
    return (known.members,) if known.former is None else (known.members, known.former)


def urls(known: Membership) -> dict[str, str]:
    """All nodes by name, also those that a pending change removes."""
    return {each.name: each.url for part in reversed(parts(known)) for each in part.nodes}


def addresses(known: Membership | None, given: Mapping[str, str]) -> dict[str, str]:
    """The nodes of the log with their addresses: as recorded, or the settings where nothing is."""
    return dict(given) if known is None else {name: url or given.get(name, "") for name, url in urls(known).items()}


def is_newer(found: Membership | None, known: Membership | None) -> bool:
    """Whether a record replaces the known one."""
    return found is not None and (known is None or found.version > known.version)


def policies(known: Membership) -> tuple[CommitPolicy, ...]:
    """The policies in force: two while a change is pending."""
    return tuple(among(parse_policy(part.policy), frozenset(_names(part))) for part in parts(known))


def policy_of(known: Membership) -> CommitPolicy:
    """What an append waits for: while a change is pending, for both policies."""
    found = policies(known)
    return found[0] if len(found) == 1 else Every(found)


def may_lead(known: Membership, name: str) -> bool:
    """Whether a node may lead: it belongs to the log and, where there are voters, it is one of them."""
    return any(_is_voter(part, name) for part in parts(known))


def _is_voter(part: LogMembers, name: str) -> bool:
    return name in _names(part) and all(name in each.voters for each in _quorums(parse_policy(part.policy)))


def _names(part: LogMembers) -> set[str]:
    return {each.name for each in part.nodes}


def _quorums(policy: CommitPolicy) -> Iterator[Quorum]:
    match policy:
        case Quorum():
            yield policy
        case Every(several):
            for each in several:
                yield from _quorums(each)
        case Among(inner):
            yield from _quorums(inner)


# --- records ---------------------------------------------------------------------------------------------------


def check_membership(found: Membership, *, term: int) -> Membership:
    """The record as another node sent it; ``InvalidInput`` if no primary up to this term can have made it."""
    if found.term > term or not 0 < found.number < _HIGHEST_NUMBER:
        raise InvalidInput(f"Membership {found.number} of term {found.term} cannot be one that term {term} knows.")
    for part in parts(found):
        _check_members(part)
    return found


def _check_members(part: LogMembers) -> None:
    names = _names(part)
    if not 0 < len(part.nodes) <= MOST_NODES or len(names) < len(part.nodes):
        raise InvalidInput(f"A log has up to {MOST_NODES} nodes, each once, not {len(part.nodes)}.")
    for each in part.nodes:
        check_replica_name(each.name)
        if len(each.url) > _LONGEST_URL or not each.url.isprintable() or " " in each.url:
            raise InvalidInput(f"{each.url[:80]!r} is no address of node {each.name}.")
    if len(part.policy) > _LONGEST_POLICY:
        raise InvalidInput(f"The commit policy has more than {_LONGEST_POLICY:,} letters.")
    for quorum in _quorums(parse_policy(part.policy)):
        if strangers := sorted(quorum.voters - names):
            raise InvalidInput(
                f"{part.policy[:200]} names {', '.join(strangers)[:200]}, which the log does not have: add it first "
                "('strandline node add')."
            )


def begun(known: Membership, change: Change, *, term: int, primary: str, force: bool = False) -> Membership:
    """The record that begins a change; the known one if there is nothing to change.

    ``force`` asks the former members for nothing: they are lost. ``InvalidInput`` for a change that cannot be,
    ``NotReady`` while another one is pending.
    """
    if isinstance(change, CancelChange):
        return _taken_back(known, change, term, primary, force=force)
    if known.former is not None and not force:
        raise NotReady(
            f"Another change is pending, {shown(known)}: wait until it is complete, or take it back "
            "('strandline node policy URL --cancel')."
        )
    after = _changed(known.members, change, primary)
    _check_members(after)
    if isinstance(change, SetPolicy):
        _check_leads(after, primary)
        _check_addresses(after)
    if after == known.members and known.former is None:
        return known
    return Membership(term, known.number + 1, after, None if force else known.members)


def _taken_back(known: Membership, change: CancelChange, term: int, primary: str, *, force: bool) -> Membership:
    if known.former is None:
        raise InvalidInput(f"No change of the members is pending: there is nothing to take back. It is {shown(known)}.")
    if change.version not in (known.version, known.takes_back):
        raise InvalidInput(
            f"Another change is pending now, {shown(known)}: nothing was taken back. Repeat the command to take back "
            "that one."
        )
    if known.takes_back != change.version:
        _check_leads(known.former, primary)
        known = Membership(term, known.number + 1, known.former, known.members, takes_back=known.version)
    return completed(known, term=term) if force else known


def _check_leads(part: LogMembers, primary: str) -> None:
    if not _is_voter(part, primary):
        raise InvalidInput(
            f"{part.policy[:200]} does not name the primary: add {primary}, or promote another node first."
        )


def _check_addresses(part: LogMembers) -> None:
    for each in part.nodes:
        if not each.url and any(each.name in quorum.voters for quorum in _quorums(parse_policy(part.policy))):
            raise InvalidInput(
                f"The address of {each.name} is not known, so that no election could ask it: give it first, by "
                f"'strandline node add URL {each.name}=NODE_URL'."
            )


def _changed(before: LogMembers, change: AddNode | RemoveNode | SetPolicy, primary: str) -> LogMembers:
    nodes = {each.name: each.url for each in before.nodes}
    match change:
        case AddNode(name, url):
            return members_of({**nodes, check_replica_name(name): url}, before.policy)
        case SetPolicy(policy):
            return members_of(nodes, parse_policy(policy))
        case RemoveNode(name):
            if name not in nodes:
                raise NotFound(f"The log has no node {name[:80]!r}: nothing was changed. It has {', '.join(nodes)}.")
            if name == primary:
                raise InvalidInput(f"{name} leads, and cannot be removed: promote another node first.")
            del nodes[name]
            return members_of(nodes, _without(parse_policy(before.policy), name))


def _without(policy: CommitPolicy, name: str) -> CommitPolicy:
    match policy:
        case Quorum(voters):
            return Quorum(voters - {name})
        case Every(several):
            return Every(tuple(_without(each, name) for each in several))
    return policy


def taken_over(known: Membership, *, term: int, primary: str) -> Membership:
    """The record with which a new primary goes on with a pending change.

    It gets the term of that primary: otherwise an older pending record of which this one knows nothing could be taken
    for the newer one. A change that would leave the log without its primary is taken back.
    """
    if known.former is None:
        return known
    after = replace(known, term=term, number=known.number + 1)
    if _is_voter(known.members, primary):
        return after
    takes_back = known.version if known.takes_back is None else None  # otherwise it goes on with the first change
    return replace(after, members=known.former, former=known.members, takes_back=takes_back)


def completed(known: Membership, *, term: int) -> Membership:
    """The record that ends a change."""
    return Membership(term, known.number + 1, known.members)


def is_in_force(change: Change, begun: Membership, known: Membership) -> bool:
    """Whether a change that ``begun`` has begun, and that is not pending any more, was completed.

    Other changes may have followed: those before one that is pending are in force, too.
    """
    now = known.members if known.former is None or known.takes_back else known.former
    match change:
        case AddNode(name, url):
            return NodeAddress(name, url) in now.nodes
        case RemoveNode(name):
            return name not in _names(now)
        case SetPolicy(policy):
            return now.policy == str(parse_policy(policy))
    return now == begun.members


def is_spread(known: Membership, offsets: DurableOffsets, holders: Collection[str]) -> bool:
    """Whether a record is durable on enough nodes, by all policies in force. The primary has it.

    A replica that never acknowledged does not count: in elections its copy counts for nothing.
    """
    has = {each.name for each in offsets.replicas if each.durable is not None and each.name in holders}
    replicas = tuple(each._replace(durable=1 if each.name in has else None) for each in offsets.replicas)
    there = offsets._replace(durable=1, replicas=replicas)
    return all(watermark(each, there) for each in policies(known))


def differs(known: Membership, nodes: Mapping[str, str], policy: CommitPolicy) -> bool:
    """Whether settings name other nodes than a record, or another policy."""
    return known.members.policy != str(policy) or not set(nodes) <= _names(known.members)


# --- for people ------------------------------------------------------------------------------------------------


def shown(known: Membership) -> str:
    """A record in a few words.

    >>> shown(Membership(1, 4, members_of({"a": "", "b": ""}, "local")))
    'membership 4 (a, b under local)'
    """
    said = [f"{', '.join(sorted(_names(part)))} under {part.policy}" for part in parts(known)]
    return f"membership {known.number} ({', before that '.join(said)})"


def check_member(known: Membership | None, name: str) -> None:
    """``Fenced`` for a node that is no member, with what to do about it; without a record every node is one."""
    if known is not None and name not in (nodes := urls(known)):
        raise Fenced(
            f"{name[:80]} is no node of this log, which has {', '.join(sorted(nodes))}: add it with 'strandline node "
            f"add URL {name[:80]}=NODE_URL', where URL is the primary's address. It tries again by itself."
        )
