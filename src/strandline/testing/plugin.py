"""The pytest plugin: fixtures for tests of programs that follow a log.

Installing the package registers it (entry point ``pytest11``). It imports nothing but pytest until a test asks for a
fixture, so that other test suites in the same environment do not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from strandline.log.object.log import ObjectLog
    from strandline.testing.clock import ManualClock
    from strandline.testing.faulty import FaultyStore
    from strandline.testing.simdisk import SimulatedDisk

SUITES: Final = ("codecs", "crashing", "keyed_stores", "sinks", "store_snapshots", "stores")
"""Modules with assertions. Their failures show values, as those in test files do."""

pytest.register_assert_rewrite(*(f"strandline.testing.{suite}" for suite in SUITES))


@pytest.fixture
def faulty_store() -> FaultyStore:
    """An empty object store in memory whose faults the test decides; the log of ``strandline_log`` is in it."""
    from strandline.testing.faulty import FaultyStore
    from strandline.testing.plain import PlainStore

    return FaultyStore(PlainStore())


@pytest.fixture
def strandline_log(faulty_store: FaultyStore) -> Iterator[ObjectLog]:
    """An empty object log in ``faulty_store``: what happens to that store happens to this log."""
    from strandline.log.object.log import open_log

    with open_log(faulty_store, create=True) as log:
        yield log


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that only the test moves; a sleep moves it, too, and takes no time."""
    from strandline.testing.clock import ManualClock

    return ManualClock()


@pytest.fixture
def simulated_disk() -> SimulatedDisk:
    """A disk in memory that loses in a crash what was not synced."""
    from strandline.testing.simdisk import SimulatedDisk

    return SimulatedDisk()
