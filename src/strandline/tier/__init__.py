"""The cold tier: closed ranges of a log as Parquet segments in object storage, listed by events on a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.model.segments import PartitionDelete as PartitionDelete
    from strandline.model.segments import PartitionDeleteState as PartitionDeleteState
    from strandline.model.segments import SegmentId as SegmentId
    from strandline.model.segments import SegmentMetadata as SegmentMetadata
    from strandline.model.segments import SegmentState as SegmentState
    from strandline.model.segments import SegmentUpdate as SegmentUpdate
    from strandline.model.segments import TopicPartition as TopicPartition
    from strandline.tier.copy.tierer import Tierer as Tierer
    from strandline.tier.metadata.manager import MetadataManager as MetadataManager
    from strandline.tier.opening import attach as attach
    from strandline.tier.opening import tiered as tiered
    from strandline.tier.opening import tiering as tiering
    from strandline.tier.read.tiered_log import TieredLog as TieredLog

__getattr__, __dir__, __all__ = lazy(__spec__)
