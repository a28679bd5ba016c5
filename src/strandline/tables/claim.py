"""One follower's claim on a table: which of several followers may commit, whatever slots they use. No I/O.

Each commit of a follower carries a mark: the id of its run, or in a database the table's epoch. A follower that starts
notes the mark that the table has; its first commit takes the table over with a mark of its own. If another follower
commits first, that takeover is a commit of the cursor alone. A follower that finds the mark of a later one is
``Fenced``, until it starts again: of two followers one ends at its next commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from strandline.errors import Fenced

Mark = TypeVar("Mark", int, str)


@dataclass(slots=True)
class TableClaim(Generic[Mark]):
    """What a follower noted when it started, and whether it has taken the table over since."""

    mark: Mark | None
    """That of the table's last commit as the follower started, then its own. None: unknown, or there was no table."""
    at: int | None
    """The table's next offset as the follower started; None: there was no table."""
    own: Mark | None = None
    """The mark that this follower's commits carry, if it is known before them."""
    is_held: bool = False

    def check(self, mark: Mark | None, at: int, where: str) -> None:
        """``Fenced`` if the table has the mark of a follower that took it over since. ``at`` is its next offset."""
        if mark is not None and mark == self.own:
            self.hold(mark)  # a commit whose answer was lost
        elif self.at is None and not self.is_held:
            self.mark, self.at = mark, at  # another one created it meanwhile: this one starts here
        elif None not in (mark, self.mark) and mark != self.mark:
            raise replaced(where)

    def is_disputed(self, at: int) -> bool:
        """Whether another follower has moved the cursor since this one started, which has not taken over yet."""
        return not self.is_held and self.at is not None and at > self.at

    def started_again(self, before: TableClaim[Mark] | None) -> TableClaim[Mark]:
        """This claim, of a follower that looks again before it has taken over: what was moved since is disputed."""
        if before is not None and not before.is_held and before.at is not None and self.at is not None:
            self.at = min(self.at, before.at)
        return self

    def hold(self, mark: Mark | None) -> None:
        """Note the follower's own commit."""
        self.mark, self.is_held = mark, True


def replaced(where: str) -> Fenced:
    """The error for a follower that another one has replaced."""
    return Fenced(
        f"Another follower changed {where} since; this one committed nothing and must stop. Keep one follower per "
        "table."
    )
