"""Found by Spark on its own: registers the data source ``strandline`` in every session."""

from strandline.spark.datasource.source import StrandlineDataSource as DefaultSource

__all__ = ["DefaultSource"]
