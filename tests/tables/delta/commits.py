"""Delta sinks that call a function right before or right after their commits."""

from __future__ import annotations

from collections.abc import Callable

from strandline.model.cursor import Cursor
from strandline.tables.delta.sink import DeltaSink
from strandline.tables.files.transaction import FileTransaction


def nothing(_: Cursor) -> None:
    """Do nothing."""


def around_commits(
    url: str, *, mode: str = "latest", before: Callable[[Cursor], object] = nothing, after=nothing
) -> DeltaSink:
    """A sink that calls ``before`` when it begins a range, and ``after`` when it has committed it."""

    class Followed(FileTransaction):
        def commit(self, written) -> None:
            super().commit(written)
            after(self.upto)

    class Sink(DeltaSink):
        def begin(self, *, since, upto, tasks):
            before(upto)
            begun = super().begin(since=since, upto=upto, tasks=tasks)
            if begun is None:
                return None
            return Followed(begun.followed, begun.version, begun.since, begun.upto, begun.parts, begun.claim)

    return Sink(url, mode=mode)
