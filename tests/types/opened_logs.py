"""A program of a user as mypy sees it: what ``sl.open`` gives has types. ``make types`` checks this; nobody runs it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type
from uuid import UUID

import pyarrow as pa

import strandline as sl


def every_log(url: str, writer: sl.log.WriterId) -> int:
    with sl.open(url, create=True) as log:
        receipt = log.append(pa.table({"value": [b"v"]}), writer=writer, number=0, expect=0).result()
        assert_type(receipt, sl.log.Receipt)
        with log.producer(linger=0.0, block=False) as producer:
            assert_type(producer, sl.Producer)
            producer.append(key=b"k", value=b"v").result(timeout=10)
        assert_type(log.bounds(), sl.log.Bounds)
        assert_type(log.log_id, UUID)
        slot = log.slots.create("billing", log.position_of("now"))
        claimed = log.slots.claim(slot.name, "worker-1")
        claimed.advance(log.end())
        rows = sum(int(batch.num_rows) for batch in log.read("beginning"))
        for span in log.plan(log.start()):
            rows += span.next - span.first
        log.wait(log.end(), 0.0)
        log.no_such_call()  # type: ignore[union-attr]  # without a type, this would be no error
    log.close()
    return rows


def a_queue(url: str) -> str:
    assert_type(sl.open(url, format="queue-v1"), sl.compat.QueueLog)
    with sl.Consumer(sl.open(url)) as consumer:
        batch = consumer.next_batch()
        return "nothing" if batch is None else str(batch.sequence)


def only_of_an_object_log(url: str) -> None:
    log = sl.open(url)
    if isinstance(log, sl.log.ObjectLog):
        log.set_retention("consumed")


def nodes(folder: Path) -> None:
    with sl.node.Primary.open(folder / "a", name="a", policy="quorum(a,b,c)", poll_seconds=0.2, timeout=5) as primary:
        assert_type(primary, sl.node.Primary)
    with sl.node.Replica.open(str(folder / "b"), primary.url, nodes={"a": primary.url}, listen=("::1", 0)) as replica:
        assert_type(replica, sl.node.Replica)
        assert_type(replica.config.automatic, bool)
    sl.node.Primary.open("c", policy=3)  # type: ignore[arg-type]
    sl.node.Replica.open("c", primary.url, nodes=["a"])  # type: ignore[arg-type]
    sl.node.Replica.open("c", primary.url, pol="local")  # type: ignore[call-arg]
    sl.node.NodeConfig(name="c")  # type: ignore[call-arg]
