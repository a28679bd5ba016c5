"""How tests are shared among processes: by file, the longest first; what needs one large server stays together.

The suite ends with its last process, so what takes long must not come late. A session of Spark or a
Kafka broker takes longer to start than most tests that need it, so one process has all of them.
"""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = {
    "tests/spark/": "spark",
    "tests/log/topic/test_kafka.py": "kafka",
    "tests/tier/test_events_elsewhere.py": "kafka",
}
"""Whatever begins like this is one piece of work."""

LONGEST = (
    "spark",
    "kafka",
    "tests/node/test_processes.py",
    "tests/fuzz/test_fuzz.py",
    "tests/log/test_kill.py",
    "tests/follow/test_table_recovery.py",
    "tests/node/test_hostile_load.py",
    "tests/cli/test_node.py",
    "tests/cli/test_tier.py",
    "tests/storage/test_wire.py",
    "tests/storage/test_on_servers.py",
    "tests/log/test_consumer.py",
    "tests/tier/test_tiered_seam.py",
    "tests/follow/test_log_key_value.py",
    "tests/cli/test_produce_and_tail.py",
    "tests/formats/test_queue_v1.py",
    "tests/model/test_watch_model.py",
    "tests/follow/test_nats.py",
)
"""The pieces that take longest, as measured. An order that is out of date costs some time, and nothing else."""


def piece_of(nodeid: str) -> str:
    """What a test is handed out with: its file, unless that stays with others.

    >>> piece_of("tests/log/test_head.py::test_it"), piece_of("tests/spark/test_batch.py::test_it")
    ('tests/log/test_head.py', 'spark')
    """
    return next((piece for start, piece in TOGETHER.items() if nodeid.startswith(start)), nodeid.split("::", 1)[0])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest pieces first, and all else in its order."""
    places = {piece: place for place, piece in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(piece_of(item.nodeid), len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One that hands out whole pieces, in the order of the tests."""
    from xdist.scheduler import LoadFileScheduling

    class Balanced(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return piece_of(nodeid)

    config.option.loadscopereorder = False
    return Balanced(config, log)
