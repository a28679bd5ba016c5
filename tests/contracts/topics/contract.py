"""The whole contract suite of topics."""

from __future__ import annotations

from tests.contracts.topics.assigning import AssigningContract
from tests.contracts.topics.closing import ClosingContract
from tests.contracts.topics.following import FollowingContract
from tests.contracts.topics.publishing import PublishingContract


class TopicContract(PublishingContract, FollowingContract, AssigningContract, ClosingContract):
    """Every sentence of :class:`~strandline.log.topic.contract.Topic`, as a test.

    A subclass named ``Test...`` defines :meth:`make_topic`; for topics that can be trimmed there is
    :class:`~tests.contracts.topics.RetentionContract`.
    """
