"""A simulated disk that loses unsynced data in a crash, and drivers that crash it at every operation.

:class:`SimulatedDisk` tracks what was synced; :class:`CrashMode` says what a crash keeps of the rest;
:func:`crash_everywhere` and similar functions stop a workload at each of its disk operations and check the result.
"""

from strandline.testing.simdisk.disk import Moment as Moment
from strandline.testing.simdisk.disk import SimulatedAction as SimulatedAction
from strandline.testing.simdisk.disk import SimulatedDisk as SimulatedDisk
from strandline.testing.simdisk.explore import crash_everywhere as crash_everywhere
from strandline.testing.simdisk.explore import fail_everywhere as fail_everywhere
from strandline.testing.simdisk.explore import fill_everywhere as fill_everywhere
from strandline.testing.simdisk.nodes import POWER as POWER
from strandline.testing.simdisk.nodes import CrashMode as CrashMode
from strandline.testing.simdisk.nodes import every as every
