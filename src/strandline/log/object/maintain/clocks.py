"""Clock checks of a trim: this machine's clock against the store's and against the log's listing times.

One wrong clock delays expiry by time, and does no other harm; :mod:`strandline.model.times` has the rules.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from strandline.errors import NotFound, StorageError
from strandline.formats.object.clock_note import decode_clock_note, encode_clock_note
from strandline.model.cursor import SECOND
from strandline.model.head import Head
from strandline.model.times import NO_DOUBT, TOLERANCE, Doubt, Present, doubt_of, may_expire, may_set_back
from strandline.storage.clock import Clock
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore, has_own_clock, measure_skew

NOTE: Final = "clock/note.json"
"""Object in which a round stores its doubt. Its modification time is the store's time."""

PROBE: Final = "clock/dry-run"
"""Object that a dry run writes and deletes, to learn the store's time."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks in one round. ``ahead``: seconds by which listing times are ahead of the present."""

    env: Env
    present: Present
    """When the round began."""
    doubt: Doubt
    ahead: float
    may_set_back: bool
    """Whether those listing times are certainly wrong."""

    def now(self) -> int:
        """The time to store and to compare with stored times. A round may take long."""
        return self.env.clock.now() + self.present.now - self.present.local

    def earliest(self) -> int:
        """The time that both clocks have reached."""
        return self.env.clock.now() + self.present.earliest - self.present.local

    @property
    def skew(self) -> float:
        """By how many seconds this machine's clock is ahead of the store's; 0 if they agree."""
        return 0.0 if self.present.agrees else (self.present.skew or 0) / SECOND

    @property
    def may_expire(self) -> bool:
        """Whether records that are old by the clock may be deleted."""
        return may_expire(self.present, self.doubt)

    @property
    def keeps_time(self) -> bool:
        """Whether both clocks agree, so that nothing is listed with an earlier time from now on."""
        return self.present.is_witnessed and self.present.skew is not None and self.present.agrees

    def warnings(self) -> list[str]:
        """Warnings about wrong clocks, each in one sentence: which clock, by how much, and the effect."""
        said = []
        if self.skew:
            which = "ahead of" if self.skew > 0 else "behind"
            said.append(
                f"This machine's clock is {spell(abs(self.skew))} {which} the store's: correct the wrong one. "
                "Records expire by age only when they are old by both clocks."
            )
        if self.ahead:
            done = "these times are set to the present" if self.may_set_back else (
                "these times stay until the store's clock agrees with this machine's"
                if self.present.is_witnessed
                else "these times are set to the present if this machine's clock agrees for a day"
            )  # fmt: skip
            said.append(
                f"Batches are listed up to {spell(self.ahead)} ahead of the present, by a producer whose clock was "
                f"ahead (or this machine's is behind): {done}."
            )
        if not self.may_expire:
            said.append(
                "The last trim was more than two days ago, or this machine's clock was set ahead since. Nothing "
                "expires by age until a trim a day from now confirms that."
            )
        return said


def compare_clocks(store: ObjectStore, head: Head, *, env: Env, dry_run: bool) -> Clocks:
    """Compare the clocks: two requests to a store that has a clock of its own.

    A dry run also reads the store's clock, by an object that it deletes again. If that write fails,
    the store's clock is unknown.
    """
    skew, doubt = None, NO_DOUBT
    is_witnessed = has_own_clock(store.url)
    if is_witnessed:
        with contextlib.suppress(StorageError):
            skew = (
                _probe(store, env.clock)
                if dry_run
                else measure_skew(store, NOTE, encode_clock_note(doubt), clock=env.clock)
            )
    present = Present(env.clock.now(), skew, is_witnessed)
    if not is_witnessed:
        before = _read_note(store)
        doubt = doubt_of(present, before, listed=head.listed, last_trim=head.trim_began)
        if doubt != before and not dry_run:
            store.put(NOTE, encode_clock_note(doubt))
    ahead = head.listed - present.now
    return Clocks(
        env,
        present,
        doubt,
        ahead / SECOND if ahead > TOLERANCE else 0.0,
        may_set_back(present, doubt, listed=head.listed),
    )


def _probe(store: ObjectStore, clock: Clock) -> int | None:
    try:
        return measure_skew(store, PROBE, b"", clock=clock)
    finally:
        store.delete(PROBE)


def _read_note(store: ObjectStore) -> Doubt:
    try:
        return decode_clock_note(store.get(NOTE).data)
    except NotFound:
        return NO_DOUBT


def spell(seconds: float) -> str:
    """A duration in words.

    >>> spell(150), spell(86400 * 365)
    ('150 s', '365 days')
    """
    for length, unit in ((86400, "days"), (3600, "hours")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s"
