"""The last append of each numbered writer, durable or queued, by which a repeated append is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strandline.log.wal.write.groups import CommitGroup, WalHandle, settled_group
from strandline.log.writers.numbered import check_number, forget_silent
from strandline.log.writers.source import remembered
from strandline.model.head import WriterId, WriterState, proof_of

_DURABLE: Final = settled_group()
_MANY_WRITERS: Final = 1024


class NumberedAppends:
    """Last appends by writer, each with the group to wait for until it is durable. The caller holds the lock."""

    __slots__ = ("_last",)

    def __init__(self, writers: Mapping[WriterId, WriterState]) -> None:
        """Begin with appends that are durable."""
        self._last = {writer: (state, _DURABLE) for writer, state in writers.items()}

    def last(self, writer: WriterId) -> tuple[WriterState, CommitGroup] | None:
        """The last append of a writer; None if it is not known."""
        return self._last.get(writer)

    def repeated(self, writer: WriterId, number: int, count: int) -> WalHandle | None:
        """The handle of an append that was made before; None if it is the writer's next. Any other is refused."""
        known, upto = remembered(writer, number)
        state, group = self._last.get(known, (None, _DURABLE))
        if state is not None and upto <= state.number:
            # An earlier number is in the same group or in an earlier one, and durable when this one is.
            first, held = (state.first, state.count) if upto == state.number else (None, count)
            return WalHandle(group, first, held, repeated=True)
        check_number(writer, number, state, known=self._last)
        return None

    def remember(self, writer: WriterId, number: int, first: int, count: int, group: CommitGroup) -> None:
        """Note a queued append; of too many writers, those that were silent longest are forgotten."""
        known, upto = remembered(writer, number)
        self._last[known] = (WriterState(upto, first, first, count, 0, proof_of(writer)), group)
        if len(self._last) > _MANY_WRITERS:
            states = {known: state for known, (state, _) in self._last.items()}
            forget_silent(states)
            self._last = {known: self._last[known] for known in states}
