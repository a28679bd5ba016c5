"""The present, as several clocks tell it: which stored times can be believed, as pure functions over values.

Any clock may be wrong by any amount, forwards or back. Times are microseconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strandline.model.cursor import SECOND

TOLERANCE: Final = 60 * SECOND
"""Clocks that differ by no more than this agree."""

DAY: Final = 86400 * SECOND
"""How long a clock has to say the same where no second one can confirm it."""

LEAP: Final = 2 * DAY
"""Two rounds of collection that are further apart than this may be so because a clock was set ahead."""


@dataclass(frozen=True, slots=True)
class Present:
    """Now, by this machine's clock and, where there is one and it could be asked, by the store's.

    ``skew`` is by how much this machine's is ahead of the store's, None if that is not known. ``is_witnessed`` says
    that the store has a clock of its own.
    """

    local: int
    skew: int | None = None
    is_witnessed: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the store's clock shows the same time, or none is known that shows another."""
        return self.skew is None or abs(self.skew) <= TOLERANCE

    @property
    def now(self) -> int:
        """The time that is written down and compared with what others wrote down: the store's, if they disagree."""
        return self.local if self.agrees else self.local - (self.skew or 0)

    @property
    def earliest(self) -> int:
        """The time that both clocks have reached: what goes by age goes by this."""
        return min(self.local, self.now)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Since when the present and the times in a log do not fit, where no second clock can tell which is wrong.

    ``ahead_since``: the log has times that lie ahead of the present. ``leap_since``: the present is days past the last
    round of collection. None: they fit.
    """

    ahead_since: int | None = None
    leap_since: int | None = None


NO_DOUBT: Final = Doubt()


def doubt_of(present: Present, doubt: Doubt, *, listed: int, collected: int) -> Doubt:
    """What is in doubt now, after what was in doubt before.

    ``listed`` is the log's last listing time, ``collected`` when the round before this one was, 0 if there was none. A
    doubt from a time that is not past yet is from a clock that has been set back since: it begins anew.
    """
    now = present.now
    ahead = leap = None
    if listed > now + TOLERANCE:
        ahead = _begun(doubt.ahead_since, now)
    if doubt.leap_since is not None and doubt.leap_since <= now:
        leap = doubt.leap_since if now - doubt.leap_since < DAY else None  # for a day it said the same: it is believed
    elif collected and now - collected > LEAP:
        leap = now
    return Doubt(ahead, leap)


def _begun(since: int | None, now: int) -> int:
    return now if since is None or since > now else since


def may_set_back(present: Present, doubt: Doubt, *, listed: int) -> bool:
    """Whether listing times ahead of the present are certainly wrong, so that they may be set to the present.

    If the present were wrong instead, all that is retained would look too old once it is right again. So a second
    clock has to agree; or, where there is none, the clock has to say the same for a day.
    """
    if listed <= present.now + TOLERANCE or not present.agrees:
        return False
    if present.is_witnessed:
        return present.skew is not None
    return doubt.ahead_since is not None and present.now - doubt.ahead_since >= DAY


def may_expire(present: Present, doubt: Doubt) -> bool:
    """Whether what is old by the clock may go.

    Where no second clock can tell a clock that leapt ahead from a log that nobody used, it has to say so for a day.
    """
    return present.is_witnessed or doubt.leap_since is None
