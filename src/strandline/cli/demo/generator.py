"""The demo's change stream: orders that are created, updated, shipped and deleted. Pure, and fixed by its seed.

Each producer has keys of its own, so that the order of a key's changes is defined however the producers interleave.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Change = tuple[bytes, bytes | None]
"""A key and its new value; None deletes it."""

_SHIPPED: Final = 0.2
"""How often a change of an order ships it; a shipped order is deleted next, and its number used again later."""

_NOTES: Final = (b"leave at the door", b"ring twice", b"gift wrapping, please", b"back entrance", b"call before")

_ABSENT, _OPEN, _DONE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What the stream is like: so many changes over so many keys, from so many producers."""

    records: int = 1_000_000
    keys: int = 100_000
    producers: int = 3
    seed: int = 7

    def share(self, producer: int) -> int:
        """How many of the changes one producer makes.

        >>> [Shape(records=10).share(producer) for producer in range(3)]
        [4, 3, 3]
        """
        return self.records // self.producers + (producer < self.records % self.producers)


def changes(shape: Shape, producer: int) -> Iterator[Change]:
    """One producer's changes, in order; the same for the same shape, in every process.

    >>> list(changes(Shape(records=3, keys=3), 0))[0]
    (b'order-0000000', b'{"order":0,"status":"created","version":1,"customer":0,"total":616.83,"note":"back entrance"}')
    """
    chance = random.Random(f"{shape.seed}/{producer}").random
    numbers = range(producer, shape.keys, shape.producers)
    states = [_ABSENT] * len(numbers)
    versions = [0] * len(numbers)
    for _ in range(shape.share(producer)):
        index = int(chance() * len(numbers))
        number, state = numbers[index], states[index]
        versions[index] += 1
        if state == _DONE:
            states[index] = _ABSENT
            yield b"order-%07d" % number, None
            continue
        if state == _ABSENT:
            status, states[index] = b"created", _OPEN
        elif chance() < _SHIPPED:
            status, states[index] = b"shipped", _DONE
        else:
            status = b"updated"
        cents = int(chance() * 100_000)
        yield (
            b"order-%07d" % number,
            b'{"order":%d,"status":"%s","version":%d,"customer":%d,"total":%d.%02d,"note":"%s"}'
            % (
                number,
                status,
                versions[index],
                number * 7919 % 9973,
                cents // 100,
                cents % 100,
                _NOTES[cents % len(_NOTES)],
            ),
        )


def producer_of(key: bytes, producers: int) -> int:
    """Which producer writes a key.

    >>> producer_of(b"order-0000007", 3)
    1
    """
    return int(key.removeprefix(b"order-")) % producers
