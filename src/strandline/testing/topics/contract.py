"""The whole contract suite of topics."""

from __future__ import annotations

from strandline.testing.topics.assigning import AssigningContract
from strandline.testing.topics.closing import ClosingContract
from strandline.testing.topics.following import FollowingContract
from strandline.testing.topics.publishing import PublishingContract


class TopicContract(PublishingContract, FollowingContract, AssigningContract, ClosingContract):
    """Every sentence of :class:`~strandline.log.topic.contract.Topic`, as a test.

    A subclass named ``Test...`` defines :meth:`make_topic`; for topics that can be trimmed there is
    :class:`~strandline.testing.topics.RetentionContract`.
    """
