"""What the executor's measuring programme writes about one device, and what is fitted to it offline.

`records` is the format of the files, shared with the programme that writes them.
"""

from perfmodel.calibrate.measured.records import (
    Ceilings,
    KernelRecord,
    MeasuredStep,
    Measurements,
    ServingRecord,
    SuiteInfo,
    read_measurements,
)

__all__ = [
    "Ceilings",
    "KernelRecord",
    "MeasuredStep",
    "Measurements",
    "ServingRecord",
    "SuiteInfo",
    "read_measurements",
]
