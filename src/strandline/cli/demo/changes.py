"""The demo's change stream, fixed by its seed.

Orders are created, updated, shipped and deleted. Each producer has keys of its own, so that the order of a key's
changes is defined however the producers interleave.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

Change = tuple[bytes, bytes | None]
"""A key and its new value; None deletes it."""

_SHIPPED: Final = 0.2
"""How often a change of an order ships it; a shipped order is deleted next, and its number used again later."""

_NOTES: Final = ("leave at the door", "ring twice", "gift wrapping, please", "back entrance", "call before")

ORDER: Final = pa.schema(
    {
        "order": pa.int64(),
        "status": pa.string(),
        "version": pa.int32(),
        "customer": pa.int32(),
        "total": pa.decimal128(10, 2),
        "note": pa.string(),
    }
)
"""The fields of an order, which are the columns of the typed tables."""
VALUE: Final = '{"order":%d,"status":"%s","version":%d,"customer":%d,"total":%s,"note":"%s"}'
"""An order as JSON."""

_ABSENT, _OPEN, _DONE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """The size of the stream: number of changes, keys and producers; and its seed."""

    records: int = 1_000_000
    keys: int = 100_000
    producers: int = 3
    seed: int = 7

    def share(self, producer: int) -> int:
        """Number of changes of one producer.

        >>> [DemoWorkload(records=10).share(producer) for producer in range(3)]
        [4, 3, 3]
        """
        return self.records // self.producers + (producer < self.records % self.producers)


def changes(workload: DemoWorkload, producer: int) -> Iterator[Change]:
    """One producer's changes, in order; the same for the same workload, in every process.

    >>> list(changes(DemoWorkload(records=3, keys=3), 0))[0]
    (b'order-0000000', b'{"order":0,"status":"created","version":1,"customer":0,"total":616.83,"note":"back entrance"}')
    """
    chance = random.Random(f"{workload.seed}/{producer}").random
    numbers = range(producer, workload.keys, workload.producers)
    states = [_ABSENT] * len(numbers)
    versions = [0] * len(numbers)
    for _ in range(workload.share(producer)):
        index = int(chance() * len(numbers))
        number, state = numbers[index], states[index]
        versions[index] += 1
        if state == _DONE:
            states[index] = _ABSENT
            yield b"order-%07d" % number, None
            continue
        if state == _ABSENT:
            status, states[index] = "created", _OPEN
        elif chance() < _SHIPPED:
            status, states[index] = "shipped", _DONE
        else:
            status = "updated"
        cents = int(chance() * 100_000)
        total = f"{cents // 100}.{cents % 100:02}"
        order = (number, status, versions[index], number * 7919 % 9973, total, _NOTES[cents % len(_NOTES)])
        yield b"order-%07d" % number, (VALUE % order).encode()
