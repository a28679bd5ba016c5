"""The commit watermark of a primary: up to where its log satisfies the log's policy, which may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.node.lead.commits import Commits
from strandline.node.lead.committed_log import ReadableLog
from strandline.node.lead.policies import CommitPolicy, DurableOffsets, is_met_alone, strengthened, watermark
from strandline.node.lead.replicas import ReplicaRegistry


@final
class CommitWatermark:
    """Everything below it satisfies the policy in force, and readers see it. It never goes back. Safe in threads.

    Durable offsets are read before the policy, in each calculation: a change of the policy waits for everything that
    was durable before the new one came into force, so that a calculation by the former one counts no more than that.
    """

    def __init__(
        self,
        log: WalLog,
        name: str,
        policy: Callable[[], CommitPolicy],
        registry: Callable[[], ReplicaRegistry],
        *,
        known: int,
    ) -> None:
        """``name`` is the primary's, ``policy`` and ``registry`` are as of now; ``known`` is committed already."""
        self._log = log
        self._name = name
        self._policy = policy
        self._registry = registry
        self._term_start = log.bounds().next
        self._last: tuple[ReplicaRegistry, DurableOffsets] = (registry(), DurableOffsets(name, -1))
        """The last durable offsets and the registry they were computed from: every append needs them several times."""
        self.commits = Commits(self._of, self.durable)
        """The appends that wait; None is the log's own policy."""
        self.commits.raise_to(None, min(known, self._term_start))

    def durable(self) -> int:
        """The durable end of the log."""
        return self._log.bounds().next

    def offsets(self) -> DurableOffsets:
        """The durable offsets of the primary and its replicas."""
        registry, durable = self._registry(), self._log.bounds().next
        of, offsets = self._last
        if of is not registry or offsets.durable != durable:
            offsets = registry.durable_offsets(self._name, durable, term_start=self._term_start)
            self._last = (registry, offsets)
        return offsets

    def required(self, extra: CommitPolicy | None) -> CommitPolicy:
        """What an append waits for that asks for this beyond the log's own policy."""
        return self._policy() if extra is None else strengthened(self._policy(), extra)

    @property
    def is_alone(self) -> bool:
        """Whether the log's policy needs nothing but durability on the primary."""
        return is_met_alone(self._policy(), self._name)

    def _of(self, extra: CommitPolicy | None) -> int:
        offsets = self.offsets()
        return watermark(self.required(extra), offsets)

    @property
    def now(self) -> int:
        """The watermark of the log's own policy."""
        durable = self.durable()
        return self.commits.raise_to(None, durable) if self.is_alone else self.commits.reached(None)

    def log(self) -> ReadableLog:
        """The log up to the watermark."""
        return ReadableLog(self._log, lambda: self.now, self._wait_durable if self.is_alone else self._wait_committed)

    def _wait_durable(self, past: int, timeout: float) -> bool:
        return self._log.wait(Cursor(self._log.log_id, past), timeout)

    def _wait_committed(self, past: int, timeout: float) -> bool:
        return self.commits.wait(None, past + 1, timeout).done
