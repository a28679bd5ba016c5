"""A simulated disk that loses unsynced data in a crash, and drivers that crash it at every operation.

:class:`SimulatedDisk` tracks what was synced; :class:`CrashMode` says what a crash keeps of the rest;
:func:`crash_everywhere` and similar functions stop a workload at each of its disk operations and check the result.
"""

from strandline.testing.simdisk.choices import Choices, Drawn, every
from strandline.testing.simdisk.disk import Moment, SimulatedAction, SimulatedCall, SimulatedDisk
from strandline.testing.simdisk.explore import (
    Check,
    Explored,
    Workload,
    crash_everywhere,
    damage_everywhere,
    fail_everywhere,
    fill_everywhere,
)
from strandline.testing.simdisk.nodes import POWER, CrashMode

__all__ = [
    "POWER",
    "Check",
    "Choices",
    "CrashMode",
    "Drawn",
    "Explored",
    "Moment",
    "SimulatedAction",
    "SimulatedCall",
    "SimulatedDisk",
    "Workload",
    "crash_everywhere",
    "damage_everywhere",
    "every",
    "fail_everywhere",
    "fill_everywhere",
]
