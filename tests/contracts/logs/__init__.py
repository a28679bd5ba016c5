"""Contract suite for logs: inherit the class, give it a log, and run it with ``pytest``."""

from __future__ import annotations

from tests.contracts.logs.appending import AppendingContract
from tests.contracts.logs.batches import append, content, fetched, records, writer_named
from tests.contracts.logs.reading import LogReadContract
from tests.contracts.logs.sealing import SealingContract
from tests.contracts.slots import SlotContract


class LogContract(AppendingContract, LogReadContract, SealingContract, SlotContract):
    """Every sentence of :class:`~strandline.log.contract.Log`, as a test.

    A subclass named ``Test...`` defines the fixture ``log``, an empty log for each test, and the two methods of
    :class:`~tests.contracts.slots.LogOwner`, which the contract leaves to the log's owner.
    """


__all__ = ["LogContract", "append", "content", "fetched", "records", "writer_named"]
