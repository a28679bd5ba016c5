"""``strandline seal``: end a log for good."""

from __future__ import annotations

from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLogAt
from strandline.cli.shared.common import Yes, confirm, connecting


@connecting
def seal(place: AnyLogAt, *, yes: Yes = False) -> None:
    """End a log for good: no more records, and followers end there.

    Durable when it returns; sealing again changes nothing. Nothing unseals a log.

    Example: strandline seal s3://bucket/orders-2025 --yes
    """
    confirm(f"{place.url} takes no more records afterwards, and nothing can undo that. Continue?", yes=yes)
    with place.writing() as log:
        end = log.seal()
        fields = {"url": log.url, "log_id": str(end.log_id), "next": end.next, "sealed": True}
    show.answer(fields, f"{fields['url']} is sealed at offset {end.next:,}: it takes no more records.")
