"""Public test doubles and contract suites (docs/testing.md): for tests of your own sinks, stores and codecs.

The suites, and the pytest plugin with its fixtures, need ``pytest`` (that of codecs ``hypothesis``, too); the doubles
need nothing that the package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.lazy_names import lazy

if TYPE_CHECKING:
    from strandline.storage.env import Env as Env
    from strandline.testing.clock import ManualClock as ManualClock
    from strandline.testing.clock import SeededChance as SeededChance
    from strandline.testing.codecs import CodecContract as CodecContract
    from strandline.testing.crashing import follow_through_crashes as follow_through_crashes
    from strandline.testing.crashing import interrupted as interrupted
    from strandline.testing.faulty import Crash as Crash
    from strandline.testing.faulty import Faults as Faults
    from strandline.testing.faulty import FaultyStore as FaultyStore
    from strandline.testing.keyed_stores import DurableStoreContract as DurableStoreContract
    from strandline.testing.keyed_stores import StoreContract as StoreContract
    from strandline.testing.plain import PlainStore as PlainStore
    from strandline.testing.simdisk import CrashMode as CrashMode
    from strandline.testing.simdisk import SimulatedDisk as SimulatedDisk
    from strandline.testing.simdisk import crash_everywhere as crash_everywhere
    from strandline.testing.simdisk import fail_everywhere as fail_everywhere
    from strandline.testing.simdisk import fill_everywhere as fill_everywhere
    from strandline.testing.sinks import MemorySink as MemorySink
    from strandline.testing.sinks import SinkContract as SinkContract
    from strandline.testing.store_snapshots import ExportingStoreContract as ExportingStoreContract
    from strandline.testing.stores import ObjectStoreContract as ObjectStoreContract

__getattr__, __dir__, __all__ = lazy(__spec__)
