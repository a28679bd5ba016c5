"""Topics: logs side by side, published to and subscribed to by partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.log.topic.contract import Message as Message
    from strandline.log.topic.contract import Topic as Topic
    from strandline.log.topic.kafka import KafkaTopic as KafkaTopic
    from strandline.log.topic.logs import open_object_topic as open_object_topic
    from strandline.log.topic.logs import open_wal_topic as open_wal_topic
    from strandline.log.topic.memory import MemoryTopic as MemoryTopic

__getattr__, __dir__, __all__ = lazy(__spec__)
