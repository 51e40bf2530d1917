"""Tasks for a measuring process of its own, some of which end it."""

import os
import signal
import time

import torch

from perfmodel_executors.gpu_suite import processes
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.kernels import tiles


def deadly():
    """In order: fine, killed, fine, gone, slow, failing, fine."""
    return [
        Task("kernels", "first", _fine),
        Task("kernels", "kills", lambda: os.kill(os.getpid(), signal.SIGKILL)),
        Task("kernels", "between", _fine),
        Task("kernels", "exits", lambda: os._exit(3)),
        Task("kernels", "slow", lambda: time.sleep(600)),
        Task("kernels", "raises", lambda: 1 / 0),
        Task("kernels", "last", _fine),
    ]


def poisoning():
    """The second one leaves the device unusable, as a device-side assert does; the third one runs out of memory."""
    return [Task("kernels", key, run) for key, run in (("a", _pid), ("b", _poison), ("c", _full), ("d", _pid))]


def broken_by_tuning():
    """Three of one operator, some candidate of which ends the process; and one of another, whose first tile does."""
    linear = [Task("kernels", f"linear {i}", _tuned_to_death, group="linear") for i in range(3)]
    return [*linear, Task("kernels", "norm", lambda: os._exit(4), group="norm")]


def unstartable():
    """As on a machine whose driver is broken."""
    raise RuntimeError("no CUDA-capable device is detected")


def _fine():
    return {"seconds": 1.0}


def _tuned_to_death():
    if tiles._may_tune.get():
        os._exit(3)
    return {"seconds": 1.0}


def _pid():
    return {"pid": os.getpid()}


def _poison():
    def fails():
        raise RuntimeError("CUDA error: device-side assert triggered")

    # What the process asks after a failure: every later call of the driver fails, too.
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = fails
    assert processes.torch.cuda.synchronize is fails
    fails()


def _full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB.")
