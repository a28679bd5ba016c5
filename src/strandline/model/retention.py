"""Retention: the policy that deletes records, the slots that pin them, and the limits of slots."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.arguments import Natural, Signed, checked, shown, whole

DEFAULT_LAG: Final = 64 << 30
"""Default lag limit in bytes of slots in a log with bounded size."""


_MOST: Final = 10**18 - 1
"""The largest number in a policy: policies are stored as text, with up to 18 digits."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True)
class Forever:
    """Nothing is ever trimmed."""

    def __str__(self) -> str:
        return "forever"


@dataclass(frozen=True, slots=True)
class Consumed:
    """A batch is deleted when every valid slot is past it; without a valid slot nothing is."""

    def __str__(self) -> str:
        return "consumed"


@dataclass(frozen=True, slots=True)
class MaxAge:
    """A batch is deleted this many seconds after it was listed, unless a valid slot needs it."""

    seconds: int

    def __post_init__(self) -> None:
        whole(1, _MOST).check(self.seconds, "The age limit of a retention policy in seconds")

    def __str__(self) -> str:
        unit, length = next((unit, _SECONDS[unit]) for unit in "dhms" if self.seconds % _SECONDS[unit] == 0)
        return f"age:{self.seconds // length}{unit}"


@dataclass(frozen=True, slots=True)
class MaxBytes:
    """The oldest batches are deleted when the log is larger than this, unless a valid slot needs them."""

    bytes: int

    def __post_init__(self) -> None:
        whole(1, _MOST).check(self.bytes, "The size limit of a retention policy in bytes")

    def __str__(self) -> str:
        return f"bytes:{self.bytes}"


FOREVER: Final = Forever()

Retention = Forever | Consumed | MaxAge | MaxBytes

_BYTES: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_QUANTITY = re.compile(r"([0-9]{1,18})([A-Za-z]*)")


def parse_retention(text: str) -> Retention:
    """Parse a policy; :class:`InvalidInput` for any other text.

    >>> parse_retention("age:7d")
    MaxAge(seconds=604800)
    >>> str(parse_retention("age:36h"))
    'age:36h'
    >>> parse_retention(str(parse_retention("bytes:2GiB")))
    MaxBytes(bytes=2147483648)
    """
    kind, _, quantity = text.partition(":")
    match kind:
        case "forever" | "consumed" if kind == text:
            return Forever() if kind == "forever" else Consumed()
        case "age":
            return MaxAge(parse_seconds(quantity))
        case "bytes":
            return MaxBytes(parse_bytes(quantity))
    raise InvalidInput(f"{shown(text)} is no retention policy: use 'forever', 'consumed', 'age:7d' or 'bytes:100GiB'.")


def as_retention(policy: str | Retention) -> Retention:
    """The policy, given as a value or as text."""
    return parse_retention(policy) if isinstance(policy, str) else policy


def parse_seconds(text: str) -> int:
    """Seconds from a text such as ``90s``, ``10m``, ``12h``, ``7d`` or ``2w``."""
    return _quantity(text, _SECONDS, "a time: use a number with s, m, h, d or w, such as 10m")


def parse_bytes(text: str) -> int:
    """Bytes from a text such as ``1048576``, ``512MiB`` or ``64GiB``."""
    return _quantity(text, _BYTES, "a size: use a number with KiB, MiB, GiB or TiB, such as 64GiB")


def _quantity(text: str, units: dict[str, int], wanted: str) -> int:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        raise InvalidInput(f"{text!r} is not {wanted}.")
    return int(found[1]) * units[found[2]]


@checked
@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Limits of slots; 0 disables a limit. A slot strictly beyond one is invalidated, with its reason.

    ``lag_bytes``: bytes listed after the slot's position (``horizon``). ``idle_seconds``: time since its holder was
    last seen (``idle-timeout``).
    """

    lag_bytes: Natural = 0
    idle_seconds: Natural = 0


NO_LIMITS: Final = SlotLimits()


def default_limits(retention: Retention) -> SlotLimits:
    """The default limits: a lag limit only if the retention policy bounds the log."""
    return SlotLimits(lag_bytes=DEFAULT_LAG if isinstance(retention, MaxAge | MaxBytes) else 0)


def limits_of(retention: Retention, lag_bytes: int | None, idle_seconds: int | None) -> SlotLimits:
    """The default limits of a policy, replaced by those that are given; 0 switches one off.

    >>> limits_of(MaxAge(60), None, 5), limits_of(MaxAge(60), 0, None)
    (SlotLimits(lag_bytes=68719476736, idle_seconds=5), SlotLimits(lag_bytes=0, idle_seconds=0))
    """
    usual = default_limits(retention)
    return SlotLimits(
        usual.lag_bytes if lag_bytes is None else lag_bytes,
        usual.idle_seconds if idle_seconds is None else idle_seconds,
    )


NEWCOMER_SECONDS: Final = 600.0
"""Seconds after which a new consumer's slot expires unless it is claimed or touched."""

HOLDS: Final = "hold-"
"""Prefix of slots for one job or reader: their names are never used again."""

TIER_SLOT: Final = "strandline-tier"
"""The tierer's slot: everything below it is in the cold tier, and may be trimmed from the hot one."""


class InvalidReason(StrEnum):
    """Why a slot stopped pinning."""

    WAL_REMOVED = "wal-removed"
    HORIZON = "horizon"
    IDLE_TIMEOUT = "idle-timeout"


@dataclass(frozen=True, slots=True)
class Invalidation:
    """Reason and time (microseconds) of a slot's invalidation."""

    reason: InvalidReason
    at: Signed


@dataclass(frozen=True, slots=True)
class SlotState:
    """The content of a slot's cell.

    ``position`` is the next offset that the consumer needs. ``epoch`` grows with each new holder and each reset; it is
    0 until the slot is claimed. A slot with ``expires`` is a *hold*, for readers that store nothing, or the slot of a
    new consumer that has not claimed it. A ``dropped`` slot pins nothing and is not listed; its cell stays, so that
    the epochs of its name keep growing. A ``hot`` slot belongs to a consumer that cannot read the cold tier: it pins
    the hot tier. ``born`` is the mark of the pin with which the slot was created or moved, and distinguishes slots of
    one name. ``suspected`` is the time when a trimmer found that the holder might be gone; any action of the holder
    clears it. ``fingerprint`` identifies the batch with the record before ``position``, as in a
    :class:`~strandline.model.cursor.Cursor`; None if unknown.

    Times are microseconds: ``last_seen`` and ``expires`` by the holder's clock, ``suspected`` by a trimmer's.
    """

    name: str
    position: Natural
    holder: str | None
    epoch: Natural
    last_seen: Signed
    invalid: Invalidation | None = None
    expires: Signed | None = None
    dropped: bool = False
    born: Natural = 0
    hot: bool = False
    suspected: Signed | None = None
    fingerprint: int | None = None

    @property
    def pins(self) -> bool:
        """Whether the slot pins the records from its position on."""
        return self.invalid is None and not self.dropped
