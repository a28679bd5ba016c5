"""Found by Spark on its own: registers the data source ``strandline`` in every session."""

from strandline.spark.source import StrandlineDataSource as DefaultSource

__all__ = ["DefaultSource"]
