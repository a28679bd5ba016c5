"""How tests are shared among processes: by file, the longest first; what needs one large server stays together.

The suite ends with its last process, so what takes long must not come late. A session of Spark or a
Kafka broker takes longer to start than most tests that need it, so one process has all of them. The examples start
sessions of their own, and are a piece of their own.
"""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = {
    "tests/spark/test_examples.py": "examples on spark",
    "tests/spark/": "spark",
    "tests/log/topic/test_kafka.py": "kafka",
    "tests/tier/test_event_topics.py": "kafka",
}
"""Whatever begins like this is one piece of work."""

LONGEST = (
    "spark",
    "tests/docs/test_pages.py",
    "examples on spark",
    "kafka",
    "tests/node/test_simulation.py",
    "tests/node/test_processes.py",
    "tests/kv/test_log_key_value.py",
    "tests/kv/test_key_values.py",
    "tests/fuzz/test_fuzz.py",
    "tests/tables/layouts/test_partitions.py",
    "tests/tables/sql/test_sql.py",
    "tests/followers/watch/test_kill_watchers.py",
    "tests/node/test_cold_tier.py",
    "tests/serve/test_processes.py",
    "tests/followers/routes/test_route_follower.py",
    "tests/tables/layouts/test_joining.py",
    "tests/tables/layouts/test_layout_contract.py",
    "tests/node/flight/test_hostile_load.py",
    "tests/serve/test_parts.py",
    "tests/tables/upkeep/test_upkeep.py",
    "tests/serve/http/test_streams.py",
    "tests/tier/read/test_tiered.py",
    "tests/node/test_log_contract.py",
    "tests/tables/maintain/test_table_recovery.py",
    "tests/tables/maintain/test_replay.py",
    "tests/bulk/test_snapshot.py",
    "tests/tables/iceberg/test_catalogs.py",
    "tests/values/test_proposal.py",
    "tests/kv/test_nats.py",
    "tests/values/test_misfits.py",
    "tests/house/test_arguments_at_the_door.py",
    "tests/values/test_codecs.py",
    "tests/tables/iceberg/test_iceberg.py",
    "tests/tables/maintain/test_maintenance_formats.py",
    "tests/storage/test_processes.py",
    "tests/log/wal/test_property.py",
    "docs/cold-tier.md",
)
"""The pieces that take longest, as measured. An order that is out of date costs some time, and nothing else."""


def piece_of(nodeid: str) -> str:
    """What a test is handed out with: its file, unless that stays with others.

    >>> piece_of("tests/log/object/test_head.py::test_it"), piece_of("tests/spark/datasource/test_batch.py::test_it")
    ('tests/log/object/test_head.py', 'spark')
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
