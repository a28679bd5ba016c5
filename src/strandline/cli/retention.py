"""``strandline retention``: show or set the retention policy and the slot limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from strandline.cli import output as show
from strandline.cli.common import Json, Url, guarded, length_of_time, open_log, size_in_bytes
from strandline.cli.common import retention as understood
from strandline.model.retention import SlotLimits, default_limits, parse_retention

_OFF = "; 0 switches it off"


@guarded
def retention(
    url: Url,
    policy: Annotated[
        str | None,
        typer.Argument(metavar="POLICY", help="forever, consumed, age:7d or bytes:100GiB.", parser=understood),
    ] = None,
    *,
    slot_lag: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=size_in_bytes, help=f"Invalidate a slot that is more bytes behind{_OFF}."),
    ] = None,
    slot_idle: Annotated[
        int | None,
        typer.Option(
            metavar="TIME", parser=length_of_time, help=f"Invalidate a slot whose holder was not seen for longer{_OFF}."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what a log may forget, or change it. The next collection goes by it.

    A new policy comes with its usual limits for slots, unless you say them: 64 GiB of lag where age or size bounds the
    log, none otherwise.
    """
    log = open_log(url)
    if policy is not None or slot_lag is not None or slot_idle is not None:
        wanted = log.identity.retention if policy is None else parse_retention(policy)
        limits = log.identity.limits if policy is None else default_limits(wanted)
        if slot_lag is not None:
            limits = replace(limits, lag_bytes=slot_lag)
        if slot_idle is not None:
            limits = replace(limits, idle_seconds=slot_idle)
        log.set_retention(wanted, limits)
    identity = log.identity
    fields = {
        "url": log.url,
        "retention": str(identity.retention),
        "slot_lag_bytes": identity.limits.lag_bytes,
        "slot_idle_seconds": identity.limits.idle_seconds,
    }
    said = f"{log.url} {show.policy(identity.retention)} ({identity.retention})."
    show.answer(fields, said, _limits(identity.limits), as_json=json)


def _limits(limits: SlotLimits) -> str:
    """What ends a slot.

    >>> _limits(SlotLimits())
    'Slots pin without a limit.'
    """
    ends = []
    if limits.lag_bytes:
        ends.append(f"it is more than {show.size(limits.lag_bytes)} behind")
    if limits.idle_seconds:
        ends.append(f"its holder was not seen for more than {show.seconds(limits.idle_seconds)}")
    return f"A slot is invalidated when {' or when '.join(ends)}." if ends else "Slots pin without a limit."
