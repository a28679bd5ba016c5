"""The object log: stateless producers write batch objects and list them in a head by compare-and-set."""

from strandline.log.object.log import ObjectLog, open_log
from strandline.log.produce.producer import Producer

__all__ = ["ObjectLog", "Producer", "open_log"]
