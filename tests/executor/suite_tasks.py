"""Tasks for a measuring process of its own, some of which end it."""

import os
import signal
import time

from perfmodel_executors.gpu_suite.task import Task


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


def _fine():
    return {"seconds": 1.0}
