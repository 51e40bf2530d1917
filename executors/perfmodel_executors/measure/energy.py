"""Energy that a GPU draws, by NVML's counter of millijoules since its driver was loaded, which Volta and newer have. It
moves some twenty times a second, so calls are repeated for half a second."""

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_MIN_S = 0.5
_LIBRARY = "libnvidia-ml.so.1"

Counter = Callable[[], float]  # joules so far


def energy_counter(device: torch.device, library: Any = None) -> Counter | None:
    """None where NVML is not there, or has no such counter of the device. library: NVML's functions."""
    if device.type != "cuda" and library is None:
        return None
    with suppress(OSError, AttributeError):
        nvml = library or ctypes.CDLL(_LIBRARY)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

        def joules() -> float:
            if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                raise OSError("NVML does not count this device's energy")
            return millijoules.value * 1e-3

        if not nvml.nvmlInit_v2() and not nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            joules()
            return joules
    return None


def joules_of(call: Callable[[], object], counter: Counter, least_s: float = _MIN_S) -> float:
    """Mean energy of a call that waits for the device, in joules."""
    num_calls, start_s, start_j = 0, time.monotonic(), counter()
    while time.monotonic() - start_s < least_s or not num_calls:
        call()
        num_calls += 1
    return (counter() - start_j) / num_calls
