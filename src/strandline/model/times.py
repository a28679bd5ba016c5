"""Comparison of clocks: whether stored times are plausible and records may expire, as pure functions over values.

Any clock may be wrong by any amount, forwards or back. Times are microseconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strandline.model.arguments import Signed
from strandline.model.cursor import SECOND

TOLERANCE: Final = 60 * SECOND
"""Clocks that differ by no more than this agree."""

DAY: Final = 86400 * SECOND
"""How long a clock must stay consistent where no second one can confirm it."""

LEAP: Final = 2 * DAY
"""If two rounds of trimming are further apart than this, a clock may have been set ahead."""


@dataclass(frozen=True, slots=True)
class Present:
    """Now, by this machine's clock and, if it has one that could be read, by the store's.

    ``skew`` is by how much this machine's clock is ahead of the store's, None if unknown. ``is_witnessed``:
    the store has a clock of its own.
    """

    local: int
    skew: int | None = None
    is_witnessed: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the store's clock shows the same time, or is unknown."""
        return self.skew is None or abs(self.skew) <= TOLERANCE

    @property
    def now(self) -> int:
        """The time to store and to compare with stored times: the store's, if the clocks disagree."""
        return self.local if self.agrees else self.local - (self.skew or 0)

    @property
    def earliest(self) -> int:
        """The time that both clocks have reached, for expiry by age."""
        return min(self.local, self.now)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Since when the present and the times in a log are inconsistent, where no second clock shows which is wrong.

    ``ahead_since``: the log has times that are ahead of the present. ``leap_since``: the present is days past the last
    round of trimming. None: consistent.
    """

    ahead_since: Signed | None = None
    leap_since: Signed | None = None


NO_DOUBT: Final = Doubt()


def doubt_of(present: Present, doubt: Doubt, *, listed: int, last_trim: int) -> Doubt:
    """The doubt now, given the former one.

    ``listed`` is the log's last listing time, ``last_trim`` the time of the previous round, 0 if there was none. A
    doubt with a time in the future is from a clock that was set back since: it starts again.
    """
    now = present.now
    ahead = leap = None
    if listed > now + TOLERANCE:
        ahead = _begun(doubt.ahead_since, now)
    if doubt.leap_since is not None and doubt.leap_since <= now:
        leap = doubt.leap_since if now - doubt.leap_since < DAY else None  # consistent for a day: accepted
    elif last_trim and now - last_trim > LEAP:
        leap = now
    return Doubt(ahead, leap)


def _begun(since: int | None, now: int) -> int:
    return now if since is None or since > now else since


def may_set_back(present: Present, doubt: Doubt, *, listed: int) -> bool:
    """Whether listing times ahead of the present are certainly wrong, so that they may be set to the present.

    If the present were wrong instead, all retained records would look too old once it is corrected. So a second
    clock has to agree; or, where there is none, the clock must stay consistent for a day.
    """
    if listed <= present.now + TOLERANCE or not present.agrees:
        return False
    if present.is_witnessed:
        return present.skew is not None
    return doubt.ahead_since is not None and present.now - doubt.ahead_since >= DAY


def may_expire(present: Present, doubt: Doubt) -> bool:
    """Whether records that are old by the clock may be deleted.

    Without a second clock, a clock that jumped ahead looks like an unused log: it must stay consistent for a day.
    """
    return present.is_witnessed or doubt.leap_since is None
